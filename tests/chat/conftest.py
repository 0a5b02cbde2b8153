"""Public families of chat templates, each with a tokenizer that has its special tokens."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import penstock.chat
from penstock.chat.chat import Chat
from penstock.tokenize.tokenizer import load_tokenizer

TEMPLATES = Path(__file__).parent / "templates"
FAMILIES = json.loads((TEMPLATES / "families.json").read_text(encoding="utf-8"))


@dataclass
class Family:
    """A template of public structure, and what is to be expected of it."""

    name: str
    source: str
    eos: str | None
    tokenizer: object = field(repr=False)
    strips: bool = False
    system: bool = True
    tools: bool = False
    thinks: bool = False
    before: str = ""
    before_end: str = ""

    chats: dict = field(default_factory=dict)

    def chat(self, **options):
        key = repr(options)
        if key not in self.chats:
            self.chats[key] = Chat(self.source, self.tokenizer, **options)
        return self.chats[key]

    def said(self, content, *, last=True):
        """The characters that are trained on when the assistant says `content`."""
        content = content.strip() if self.strips else content
        before = self.before
        if self.thinks and last:
            before, content = "<think>\n\n</think>\n\n", content.lstrip("\n")
        if self.name == "smollm3":
            content = content.lstrip("\n")
        return before + content + self.before_end + (self.eos or "")


def pytest_generate_tests(metafunc):
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", FAMILIES, indirect=True, scope="session")


CORPUS = (
    "The quick brown fox jumps over the lazy dog. What is it? It is the answer to the question.",
    "def f(x):\n    return x ** 2\n\n### Instruction:\n### Response:\nUSER: ASSISTANT: system user",
    'Größe, naïve café; 你好, 谢谢; Привет, мир! 👋 12345 \t {"name": "search", "arguments": {}}',
)


@pytest.fixture(scope="session")
def make_tokenizer():
    """A byte-level vocabulary of 600 tokens with special ones; a `tokenizers` object."""
    import tokenizers

    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    base = tokenizers.Tokenizer(tokenizers.models.BPE())
    base.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = tokenizers.decoders.ByteLevel()
    base.train_from_iterator(CORPUS * 4, trainer)

    def make(special, *, rstrip=False):
        made = tokenizers.Tokenizer.from_str(base.to_str())
        made.add_special_tokens(
            [tokenizers.AddedToken(each, rstrip=rstrip, normalized=False) for each in special]
        )
        return made

    return make


class Named:
    """A `tokenizers` object that also says which tokens begin and end a text, as
    `transformers` wraps it."""

    def __init__(self, backend, bos, eos):
        self.backend_tokenizer = backend
        self.bos_token, self.eos_token = bos, eos


@pytest.fixture(scope="session")
def _families():
    return {}


@pytest.fixture(scope="session")
def family(request, make_tokenizer, _families):
    name = request.param
    if name not in _families:
        told = dict(FAMILIES[name])
        backend = make_tokenizer(told.pop("special"), rstrip=told.pop("rstrip", False))
        source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8").removesuffix("\n")
        written = {"</s>": "</s>", "<|endoftext|>": "<|endoftext|>"}.get(told["eos"])
        tokenizer = load_tokenizer(Named(backend, told.pop("bos", None), written))
        _families[name] = Family(name, source, tokenizer=tokenizer, **told)
    return _families[name]


@pytest.fixture(scope="session")
def chat_records(data):
    """All records of the shared fine-tuning sets: Alpaca, seed tasks, tool calls, ShareGPT."""
    records = []
    for path in sorted((data / "chat").iterdir()):
        text = path.read_text(encoding="utf-8")
        lines = [line for line in text.split("\n") if line.strip()]
        records += json.loads(text) if path.suffix == ".json" else map(json.loads, lines)
    return records


BUILTIN = Path(penstock.chat.__file__).parent / "templates"
SOURCES = {
    path.stem if path.parent == BUILTIN else f"test-{path.stem}": path
    for path in sorted([*BUILTIN.glob("*.jinja"), *TEMPLATES.glob("*.jinja")])
}


@pytest.fixture(params=SOURCES)
def template(request, make_tokenizer):
    """Every template in the tree: its name, its source, a tokenizer of `transformers` with its
    tokens, and whether it takes a system message."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    path = SOURCES[request.param]
    family = FAMILIES.get(path.stem, {}) if path.parent == TEMPLATES else {}
    bos, eos = family.get("bos", "<s>"), "</s>"
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer([bos, eos, *family.get("special", [])]),
        bos_token=bos,
        eos_token=eos,
    )
    return request.param, path.read_text(encoding="utf-8"), fast, family.get("system", True)
