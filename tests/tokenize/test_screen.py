"""A hostile tokenizer.json is refused before native code sees it, and public ones are not."""

import base64
import copy
import json

import pytest
from tokenizers import pre_tokenizers

from penstock.errors import TokenizerError
from penstock.tokenize.definition import _gpt2
from penstock.tokenize.screen import screen
from penstock.tokenize.tokenizer import load_tokenizer

# Loads mutants of small tokenizers, in a process of its own with 6 GB: an abort would end it.
FUZZ = """
import copy, json, logging, random, resource, sys
import tokenizers
from tokenizers import decoders, models, processors
from penstock.errors import TokenizerError
from penstock.tokenize.tokenizer import load_tokenizer

count, path, rng = int(sys.argv[1]), sys.argv[2], random.Random(15)
logging.disable(logging.CRITICAL)
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
piece = tokenizers.Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1, "##b": 2}, unk_token="[UNK]"))
unknown = [("[UNK]", 1)]
piece.post_processor = processors.TemplateProcessing(single="[UNK] $A", special_tokens=unknown)
piece.decoder = decoders.WordPiece()
piece.enable_truncation(10)
piece.enable_padding()
unigram = models.Unigram([("<unk>", 0.0), ("a", -1.0), ("ab", -1.5)], 0, False)
bases = [json.loads(open(path).read()), json.loads(piece.to_str())]
bases.append(json.loads(tokenizers.Tokenizer(unigram).to_str()))
deep = []
for _ in range(700):
    deep = [deep]
odd = [None, True, -1, 0, 255, 600_000_000, 2**31 - 1, 2**31, 2**32, 2**63, 10**30, -(2**63), 1.5]
odd += ["", "x", chr(0), "a b", chr(0xD800), "e" * 9999, [], [[]], [1], ["a", "b", "c"], {}, deep]
odd += [{"type": "x"}, {"a": -1}, {"type": "Sequence"}, {"Regex": "("}, {"Fixed": 2**40}]

def paths(value, at=()):
    keys = list(value) if isinstance(value, dict) else ()
    keys = range(len(value)) if isinstance(value, list) else keys
    for key in rng.sample(list(keys), min(8, len(keys))):
        yield (*at, key)
        yield from paths(value[key], (*at, key))

refused = 0
for number in range(count):
    mutant = copy.deepcopy(rng.choice(bases))
    *outer, last = rng.choice(list(paths(mutant)))
    inside = mutant
    for key in outer:
        inside = inside[key]
    if isinstance(inside, dict) and rng.random() < 0.2:
        del inside[last]
    else:
        inside[last] = rng.choice(odd)
    with open(path, "w") as stream:
        sys.setrecursionlimit(5000)
        json.dump(mutant, stream)
        sys.setrecursionlimit(1000)
    print(number, *outer, last, flush=True)
    try:
        loaded = load_tokenizer(path, special_tokens=rng.choice(["text", "parse"]))
        loaded.decode(loaded.encode("the cat sat ab a <|endoftext|> na\u00efve"))
        loaded.describe()
    except TokenizerError:
        refused += 1
print("refused", refused)
# Not ru_maxrss: Linux begins it with the memory of the process that started this one.
for line in open("/proc/self/status") if sys.platform == "linux" else ():
    name, _, value = line.partition(":")
    assert name != "VmHWM" or int(value.split()[0]) < 3_000_000, line
"""


def nested(depth):
    step = {"type": "NFC"}
    for _ in range(depth):
        step = {"type": "Sequence", "normalizers": [step]}
    return step


def changed(config, path, value):
    """A copy of `config` with another value at a dotted path."""
    made = copy.deepcopy(config)
    inside = made
    *outer, last = path.split("/")
    for key in outer:
        inside = inside[int(key) if isinstance(inside, list) else key]
    inside[int(last) if isinstance(inside, list) else last] = value
    return made


HOSTILE = [
    ("model/vocab/!", 600_000_000, r"has 29\d tokens, and the id 600,000,000"),
    ("model/vocab/!", 2**31, "id of '!' is 2147483648, not a whole number from 0"),
    ("model/vocab/!", -1, "id of '!' is -1, not"),
    ("model/vocab/!", True, "id of '!' is True, not"),
    ("model/vocab/!", 1.5, "id of '!' is 1.5, not"),
    ("added_tokens/0/id", 600_000_000, "and the id 600,000,000 among them"),
    ("added_tokens/0/id", 2**31, r"added_tokens\[0\].id is 2147483648"),
    ("added_tokens/0/id", None, r"added_tokens\[0\].id is None"),
    ("added_tokens/0/content", 5, r"added_tokens\[0\] is"),
    ("added_tokens/0/special", "yes", r"added_tokens\[0\].special is 'yes', not true or false"),
    ("added_tokens/0", [], r"added_tokens\[0\] is \[\], not an object"),
    ("added_tokens", {}, "added_tokens is {}, not a list"),
    ("model/vocab", 7, "model.vocab is 7, not an object or a list"),
    ("model/vocab", [["a", "b"]], r"model.vocab\[0\] is \['a', 'b'\], not a token and its score"),
    ("model/merges", {}, "model.merges is {}, not a list"),
    ("model/merges/0", ["a"], r"model.merges\[0\] is \['a'\], not two tokens"),
    ("model/merges/0", "no such", r"model.merges\[0\] is 'no such', not two tokens of the voc"),
    ("normalizer", [], r"normalizer is \[\], not an object or null"),
    ("normalizer", nested(70), "nested more than 64 levels deep"),
    ("truncation", 2**40, "truncation is 1099511627776, not an object or null"),
    ("padding", "x", "padding is 'x', not an object or null"),
    ("post_processor", {"type": "RobertaProcessing"}, "is not a usable tokenizer.json"),
    ("model", [], 'it has no "model"'),
]


@pytest.mark.parametrize(("path", "value", "message"), HOSTILE)
def test_a_hostile_tokenizer_is_refused_with_the_field(path, value, message, small, tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(changed(small, path, value)))

    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(file)


def test_a_map_of_characters_that_says_a_false_size_is_refused(small, tmp_path, quick_python):
    """The library would allocate that size, and end the process."""
    file = tmp_path / "tokenizer.json"
    for data in (b"\xff" * 40, (99).to_bytes(4, "little") + b"x" * 8):
        step = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}
        file.write_text(
            json.dumps({**small, "normalizer": {"type": "Sequence", "normalizers": [step]}})
        )
        done = quick_python(f"import penstock; penstock.load_tokenizer({str(file)!r})", check=False)
        assert "TokenizerError: " in done.stderr
        assert "precompiled_charsmap is" in done.stderr


PANICS = {
    "pre_tokenizer": {"type": "FixedLength", "length": 0},
    "normalizer": {
        "type": "Replace",
        "pattern": {"Regex": "(a+)+$"},
        "content": "b",
    },
    "decoder": {"type": "Strip", "content": "a", "start": 2**62, "stop": 2**62},
}


@pytest.mark.parametrize("key", PANICS)
def test_a_panic_of_the_library_is_an_error_that_can_be_caught(key, small, tmp_path):
    if key == "pre_tokenizer" and not hasattr(pre_tokenizers, "FixedLength"):
        pytest.skip("tokenizers 0.21 has no such pre-tokenizer")
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({**small, key: PANICS[key]}))

    def use():
        loaded = load_tokenizer(file, engine="tokenizers")
        loaded.decode(loaded.encode("a" * 60 + "b"))

    with pytest.raises(TokenizerError, match="because tokenizers failed with: "):
        use()


def test_a_model_that_cannot_encode_a_text_is_an_error_of_ours(tmp_path):
    model = {"type": "WordPiece", "unk_token": "[UNK]", "vocab": {"a": 0}}
    model |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))

    with pytest.raises(TokenizerError, match=r"because tokenizers failed with: .*UNK"):
        load_tokenizer(file).encode("b")


def test_json_that_is_nested_without_end_is_refused(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text("[" * 100_000)

    with pytest.raises(TokenizerError, match="nested too deep"):
        load_tokenizer(file)


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    file = tmp_path / "tokenizer.json"
    with file.open("wb") as stream:
        stream.truncate(1 << 40)  # takes no room on the disk

    with pytest.raises(TokenizerError, match="has 1,099,511,627,776 bytes"):
        load_tokenizer(file)


def test_public_tokenizers_pass(data, small):
    screen(json.loads((data / "gpt2" / "tokenizer.json").read_bytes()), "gpt2")
    screen(_gpt2().config, "gpt2")
    # Reserved ids after a vocabulary, as many models have them.
    reserved = changed(small, "added_tokens/0/id", 1_000_000)
    screen(reserved, "reserved")


def fuzz(count, small_file, python):
    done = python(FUZZ, count, small_file, check=False, timeout=1800)
    assert done.returncode == 0, (done.stdout[-200:], done.stderr[-2000:])
    return int(done.stdout.split()[-1])


def test_mutants_of_tokenizers_end_in_tokens_or_a_named_error(small_file, python):
    assert fuzz(60, small_file, python) > 10


@pytest.mark.torture
def test_thousands_of_mutants_end_in_tokens_or_a_named_error(small_file, python, figure):
    refused = fuzz(5_000, small_file, python)

    figure(f"tokenizers: 5,000 mutants loaded, {refused:,} refused by name, none ended the process")
