"""A run of two sources whose texts, files and names try to be markup."""

import json
from pathlib import Path

import pytest
import torch

from penstock.recipe import read_recipe
from penstock.train.command import run_recipe

# Each would run `alert`, or change the page, if it became markup, a script or a style.
INJECTIONS = [
    "<script>alert(1)</script>",
    "</script><script>alert(2)</script>",
    "<img src=x onerror=alert(3)>",
    "<svg onload=alert(4)>",
    "<svg><script>alert(5)</script></svg>",
    "<iframe src=javascript:alert(6)></iframe>",
    "<a href=javascript:alert(7)>x</a>",
    "<body onload=alert(8)>",
    "<style>*{display:none}</style>",
    "</style><script>alert(10)</script>",
    "</title><script>alert(11)</script>",
    "<!--<script>alert(12)</script>-->",
    "--><script>alert(13)</script>",
    "<![CDATA[<script>alert(14)</script>]]>",
    '"><script>alert(15)</script>',
    "'><script>alert(16)</script>",
    '" onmouseover="alert(17)',
    "' onfocus='alert(18)' autofocus='",
    "javascript:alert(19)",
    "{{ 7 * 7 }}",
    "{% raw %}{{ config }}{% endraw %}",
    "${alert(22)}",
    "`${alert(23)}`",
    "\\u003cscript\\u003ealert(24)\\u003c/script\\u003e",
    "&lt;script&gt;alert(25)&lt;/script&gt;",
    "&#60;script&#62;alert(26)&#60;/script&#62;",
    "<scr<script>ipt>alert(27)</scr</script>ipt>",
    "<ScRiPt>alert(28)</ScRiPt>",
    "<script\t>alert(29)</script\t>",
    "<img/src=`x`onerror=alert(30)>",
    "<math><mtext></mtext><script>alert(31)</script></math>",
    "<template><script>alert(32)</script></template>",
    '<noscript><p title="</noscript><img src=x onerror=alert(33)>">',
    "<textarea></textarea><script>alert(34)</script>",
    "<meta http-equiv=refresh content=0;url=http://example.com>",
    "<base href=http://example.com/>",
    "<link rel=stylesheet href=http://example.com/a.css>",
    "<object data=javascript:alert(38)></object>",
    "<embed src=javascript:alert(39)>",
    "<form action=http://example.com><button>x</button></form>",
    "<details open ontoggle=alert(41)>",
    "<video><source onerror=alert(42)></video>",
    "<input autofocus onfocus=alert(43)>",
    "<marquee onstart=alert(44)>",
    "<div style=background:url(http://example.com/x)>",
    "<x onclick=alert(46)>x</x>",
    "\u202e<script>alert(47)</script>",
    "\x1b]0;title\x07<b>",
    "\ufeff<script>alert(49)</script>",
    "</main><main id=main>",
]
assert len(set(INJECTIONS)) == 50
RECIPE = """
output = "run"
[data]
length = 160
tokenizer = "bytes"
[data.sources."<b>web"]
train = "web.jsonl"
weight = 3
[data.sources."$plays$"]
train = "<img src=x onerror=alert(1)>.jsonl"
weight = 1
rows = "packs"
[model]
size = "nano"
layers = 1
width = 8
heads = 1
[training]
steps = 5
batch_size = 4
val_every = 5
save_every = 5
"""


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The directory of a recipe, and of its run of five steps."""
    folder = tmp_path_factory.mktemp("report")
    torch.set_num_threads(1)
    lines = [f"{text} in document {n}" for n, text in enumerate(INJECTIONS)]
    more = [f"Line {n}: the fox jumps over {n % 7} dogs." for n in range(80)]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_jsonl("web.jsonl", [*lines, *INJECTIONS, *INJECTIONS])
        write_jsonl("<img src=x onerror=alert(1)>.jsonl", more)
        Path("run.toml").write_text(RECIPE)
        run_recipe(read_recipe(Path("run.toml")), device="cpu", log=lambda _: None)
    return folder


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return folder


def write_jsonl(name, texts):
    Path(name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
