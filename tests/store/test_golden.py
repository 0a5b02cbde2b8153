"""The bytes of one small store, for ever.

Whoever changes a literal here changes what every reader of old stores meets: it demands an
entry under "Store format" in CHANGELOG.md.
"""

import json

import pytest

import penstock

TABLE = "e57072ae13df61cea37ebd9fd9778518c1c1a4caf351758791df96e762f330a7"
GOLDEN = {
    "part-00000.bounds.npy": "2f0a25919273bebd7ffce9760c07d7c982c6007c8aaeb47a8188d23a76133f5f",
    "part-00000.checks.npy": "cd0df4b45f7eb8e7e71f2cff2ad54d94c89c4a6fc1126ce6c84bd5d0ffe644f5",
    "part-00000.origin.npy": "041d1e47009f263115cf972be2d5aa4f9964582d3f139128a8d38f8673c2eb5e",
    "part-00000.tokens.npy": "c03c17ef825479263f5fa3a15224059eef463ff871aee18c9a52db2949756a5e",
    "part-00001.bounds.npy": "85e4bfccc9455cd8970b3538a4823c10a7b5c6a9e20d8bc3eb044f16bdf224f6",
    "part-00001.checks.npy": "fdbc981843f32cca44e59c9048a7bce09c354f7444d6d60308e2f4174d10ae1c",
    "part-00001.origin.npy": "9c43d367a016068ccd21f27433591f52bf6051f784351296f689c3ca133ae78f",
    "part-00001.tokens.npy": "c2c26a81119880de22e5c83088b00d1a09a77fbe5da6c1ca86fecf32750fbd48",
    "part-00002.bounds.npy": "49fd6b9c1063f4a558f7a625b8096351f99127ddf25148df9499ea7e3ca912ba",
    "part-00002.checks.npy": "e70db1c61316fcaa63a4f0c8cd6bb390f850d249606446edc5b066f5acc45c00",
    "part-00002.origin.npy": "484c4d2b4094e5a8a0e7a668dec25e8914a31ec6d34c5a7f8f9ce789afb3b2cd",
    "part-00002.tokens.npy": "e2ec945be514ef463c9a9395ec7db577f4f2347b8324dbdaad4925a0cb0c9615",
    f"parts-{TABLE[:16]}.npy": TABLE,
    "penstock.json": "14f366c77e303d4221ee431d01389b4b87b0cfbd6f9e4af5ce7c1340bc1425be",
    "rejects.jsonl": "93d130bb302a9e420160d3ce357cd7273179a92c1503b6f69a64344b791333ba",
}


@pytest.mark.usefixtures("small_slices")
def test_the_bytes_of_a_known_store(tmp_path, monkeypatch, gpt2, sums):
    monkeypatch.chdir(tmp_path)
    lines = [f"Line {number}: naïve café, 你好 😀 {number * 7919}\n" for number in range(150)]
    (tmp_path / "a.txt").write_bytes("".join(lines).encode() + b"\xff\n")
    rows = [{"text": f"row {number} <|endoftext|>"} for number in range(50)]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, [*rows, {"no": 1}])))
    penstock.build(["a.txt", "b.jsonl"], "store", tokenizer=gpt2, documents="lines", max_bad=10)

    assert sums("store") == GOLDEN
