"""Run the code "before" of docs/migrating.md, and compare it with the code "after".

    python benchmarks/migrating.py
    python benchmarks/migrating.py --only nanoGPT OLMo

Each section runs in its own process and directory: the first block of the page, the code before,
the code after, and a comparison of what the page says is the same. Sections whose packages are not
installed are skipped and named. `make bench` installs all of them.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "migrating.md"

# Names that code before takes from its surroundings, and models that it would download.
PRELUDE = """
import importlib.machinery, sys, types, warnings
import numpy as np, torch
warnings.simplefilter("ignore")
from penstock.integrations.huggingface import hf_tokenizer
tokenizer = hf_tokenizer("gpt2")
"""
SETUP = {
    "Hand-written DataLoader": """
lines = [json.dumps({"text": f"Line {n}: the quick brown fox jumps."}) for n in range(500)]
Path("train.jsonl").write_text("\\n".join(lines))
""",
    "nanoGPT": 'ps.export_tokens(store, "nanogpt", to="nanogpt")',
    "Hugging Face map and group_texts": """
import transformers
transformers.AutoTokenizer.from_pretrained = lambda name: hf_tokenizer(name)
""",
    "Hugging Face streaming": """
import transformers
transformers.AutoTokenizer.from_pretrained = lambda name: hf_tokenizer(name)
""",
    "LitData": """
from litdata.streaming.item_loader import TokensLoader
from litdata.streaming.writer import BinaryWriter
Path("litdata").mkdir()
writer = BinaryWriter("litdata", chunk_bytes="64MB", item_loader=TokensLoader())
for number in range(len(store)):
    writer[number] = torch.from_numpy(store.document(number).astype(np.int32))
writer.done()
writer.merge()
""",
    # `import streaming` imports torchvision, whose wheels need a torch with CUDA.
    "MosaicML Streaming": """
spec = importlib.machinery.PathFinder.find_spec(
    "streaming", [each for each in sys.path if not each.endswith("benchmarks")]
)
if spec is None:
    raise ModuleNotFoundError("No module named 'streaming'")
package = types.ModuleType("streaming")
package.__path__, package.__spec__ = list(spec.submodule_search_locations), spec
sys.modules["streaming"] = package
import streaming.base
package.StreamingDataset = streaming.base.StreamingDataset
with streaming.base.MDSWriter(out="mds", columns={"tokens": "ndarray:uint16"}) as writer:
    for number in range(len(store)):
        writer.write({"tokens": np.array(store.document(number), np.uint16)})
""",
    "Megatron-LM": 'ps.export_tokens(store, "megatron", to="megatron")',
    "OLMo": """
Path("olmo").mkdir()
store.tokens(0, store.num_tokens).tofile("olmo/part-0.npy")
""",
    "torchtitan": """
plain = tokenizer
class Titan:
    def encode(self, text, add_bos, add_eos):
        return [plain.bos_token_id, *plain.encode(text), plain.eos_token_id]
tokenizer = Titan()
""",
    "TRL": """
import transformers
turns = [
    [
        {"role": "user", "content": f"What is {n} + 1?"},
        {"role": "assistant", "content": f"It is {n + 1}."},
    ]
    for n in range(100)
]
Path("chats.jsonl").write_text("".join(json.dumps({"messages": each}) + "\\n" for each in turns))
tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
tokenizer.pad_token = tokenizer.eos_token
tokenizer.chat_template = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}"
    "{{ '<|im_end|>' }}{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}"
    "{% endif %}{{ '\\\\n' }}{% endfor %}"
)
size = {"n_embd": 32, "n_layer": 1, "n_head": 2}
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=len(tokenizer), **size))
""",
}
# What is kept of the code before, and compared with the code after.
KEEP = {
    "Hand-written DataLoader": "old = dataset",
    "nanoGPT": "old = x, y",
    "Hugging Face map and group_texts": "old = dataset",
    "Hugging Face streaming": "old = first",
    "LitData": "old = x, y",
    "MosaicML Streaming": "old = [each['tokens'].tolist() for each in dataset]",
    "Megatron-LM": "old = document, len(dataset)",
    "OLMo": "old = row, len(dataset)",
    "torchtitan": "old = inputs, labels",
    "TRL": "old = trainer.train_dataset",
}
COMPARE = {
    # Rows and labels, item by item.
    "Hand-written DataLoader": """
new = train_loader.dataset
assert len(new) == len(old)
for number in (0, 1, 500, len(old) - 1):
    for key in ("input_ids", "labels"):
        assert new[number][key].tolist() == old[number][key].tolist()
""",
    # Ids and labels.
    "nanoGPT": """
flat = tokens.part_ids(0).tolist()
for one, two in (old, (x, y)):
    for inputs, targets in zip(one.tolist(), two.tolist()):
        assert any(
            flat[at : at + 64] == inputs and flat[at + 1 : at + 65] == targets
            for at in range(len(flat) - 64)
        )
""",
    # The rows, with stride=64, and the labels.
    "Hugging Face map and group_texts": """
windows = ps.Windows(store, length=64)
new = windows.read(np.arange(len(windows)))["tokens"][:, :64].tolist()
assert new == [list(row) for row in old["input_ids"]][: len(new)]
assert len(old) - len(new) <= 1  # its last token has no token after it
assert list(old["labels"][0]) == list(old["input_ids"][0])
""",
    # The ids of the documents.
    "Hugging Face streaming": """
assert old.shape == first.shape
known = [each.tolist() for each in store]
assert old[0].tolist()[:8] in [each[:8] for each in known]
""",
    # Ids and labels.
    "LitData": """
flat = store.tokens(0, store.num_tokens).tolist()
for one, two in (old, (x, y)):
    for inputs, targets in zip(one.tolist(), two.tolist()):
        assert any(
            flat[at : at + 64] == inputs and flat[at + 1 : at + 65] == targets
            for at in range(len(flat) - 64)
        )
""",
    # One document a row.
    "MosaicML Streaming": """
assert sorted(old) == sorted(each.tolist() for each in store)
assert len(rows) == len(old)
""",
    # Ids and documents.
    "Megatron-LM": """
assert document.tolist() == old[0].tolist()
assert len(tokens) == old[1] == 400
""",
    # Rows.
    "OLMo": """
assert row.tolist() == old[0].tolist()
assert old[1] == store.num_tokens // 64
""",
    # Positions restart with each document, and no target is in the next document.
    "torchtitan": """
assert old[0]["input"].shape == inputs["input"].shape
assert (old[0]["positions"][0] == 0).sum() > 1
assert (inputs["positions"][0] == 0).sum() > 1
starts = (inputs["positions"][:, 1:] == 0).nonzero().tolist()
assert all(labels[row, at] == -100 for row, at in starts)
old_starts = (old[0]["positions"][:, 1:] == 0).nonzero().tolist()
assert all(old[1][row, at] == plain.eos_token_id for row, at in old_starts)
""",
    # A conversation a row with the same ids; the same tokens trained on.
    "TRL": """
assert len(old) == len(chat_store) == 100
for number in range(100):
    ids = old[number]["input_ids"]
    assert list(ids) == chat_store.document(number).tolist(), number
mask = [int(label != -100) for row in old["labels"] for label in row]
assert mask == chat_store.part_array(0, "loss").tolist()
""",
}


def sections():
    """The first Python block of the page, and the code before and after of each section."""
    first, *rest = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.M)
    pattern = r"(<!-- no-run -->|)\s*^```python\n(.*?)^```$"
    start = re.findall(pattern, first, re.M | re.S)[0][1]
    found = {}
    for section in rest:
        title, _, body = section.partition("\n")
        blocks = re.findall(pattern, body, re.M | re.S)
        before = [code for mark, code in blocks if mark]
        if before:
            # Where the files are made by another tool, the code after is marked too.
            found[title] = before[0], next((code for mark, code in blocks if not mark), before[-1])
    return start, found


def run(title, start, before, after):
    """Run one section; returns "ok", or why it was skipped."""
    # What the code after writes is there already, for the code before.
    again = after.replace('Path("olmo").mkdir()', 'Path("olmo").mkdir(exist_ok=True)')
    again = re.sub(r"(ps\.export_tokens\(.*)\)", r"\1, overwrite=True)", again)
    # TRL asks for bfloat16 on a GPU.
    before = before.replace('report_to="none"', 'report_to="none", use_cpu=True, bf16=False')
    steps = [PRELUDE, start, SETUP[title], before, KEEP[title], again, COMPARE[title]]
    with tempfile.TemporaryDirectory() as folder:
        # A file: some packages start processes that import the main module.
        code = "".join(f"    {line}\n" for step in steps for line in step.splitlines())
        script = Path(folder) / "section.py"
        script.write_text(f"def main():\n{code}\n\nif __name__ == '__main__':\n    main()\n")
        environment = {**os.environ, "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
        done = subprocess.run(
            [sys.executable, str(script)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    if done.returncode == 0:
        return "ok"
    missing = re.findall(r"ModuleNotFoundError: (No module named .*)", done.stderr)
    if missing:
        return f"skipped: {missing[-1]}"
    sys.exit(f"{title}:\n{done.stdout}\n{done.stderr}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", help="titles of sections")
    only = parser.parse_args().only
    start, found = sections()
    assert list(found) == list(COMPARE), "the page has other sections than this script"
    for title, (before, after) in found.items():
        if not only or title in only:
            sys.stdout.write(f"{title}: {run(title, start, before, after)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
