"""Stores that came in an archive, with links and pipes named like the files that penstock writes.

Nothing outside the store changes, and nothing hangs: a command succeeds, or ends with an error of
penstock.
"""

import io
import json
import os
import shutil
import tarfile

import pytest
import zygote

import penstock
from penstock.sources.settings import Texts

pytestmark = pytest.mark.skipif(os.name == "nt", reason="no named pipes on this system")

FILES = ["penstock.json", "rejects.jsonl", "rejects-00001.jsonl", ".lock", ".stamps.json"]
FILES += [".building.json", ".slice-000000.json", ".slice-000001.json", ".ready-000000.json"]
FILES += [
    ".again",
    ".ready-000000.tmp",
    ".many-000000",
    ".awaited",
    ".failed",
    ".penstock.json.1.2.tmp",
]
FILES += [f"part-0000{n}.{kind}.npy" for n in (0, 1) for kind in ("tokens", "bounds", "origin")]
BESIDE = [".store.lock", ".store.stamps.json", ".store.new", ".store.old"]
KINDS = ["link", "dead link", "link to a directory", "hard link", "pipe", "directory"]
# Everything that opens a store. In a separate process, because a hang must not stop the tests.
RUN = """
import json, sys
import penstock as ps
for line in sys.stdin:
    store, verb, text, split = json.loads(line)
    settings = dict(tokenizer="bytes", documents="lines")
    side = store + "/train" if split else store
    try:
        if verb == "build":
            ps.build(text, store, **settings, split=split)
        elif verb in ("append", "overwrite"):
            ps.build(text, store, **settings, split=split, **{verb: True})
        elif verb == "stream":
            with ps.stream(text, store, **settings) as streamed:
                for tokens in streamed:
                    pass
        elif verb == "read":
            opened = ps.TokenStore(side)
            [opened.document(number) for number in range(len(opened))]
            ps.Packs(opened, 16)[0]
        else:
            ps.verify(side)
            ps.store.summarize(ps.TokenStore(side))
    except Exception as error:  # what the message of a damaged file says is tested elsewhere
        print("refused:", type(error).__name__, str(error).replace("\\n", " "), flush=True)
    else:
        print("done", flush=True)
"""
VERBS = ("build", "append", "overwrite", "stream", "verify", "read")


class Victim:
    """Files of the user outside of the store, which must not change."""

    def __init__(self, folder):
        self.folder = folder / "home"
        (self.folder / "directory").mkdir(parents=True)
        self.file = self.folder / "id_rsa"
        self.file.write_text("not to be lost")
        (self.folder / "directory" / ".precious.tmp").write_text("also not to be lost")
        (self.folder / "directory" / "part-00000.tokens.npy").write_text("mine")
        self.before = {}

    def state(self):
        """Name, contents, type, mode and times of all that is there."""
        return {
            str(path): (
                path.read_bytes()
                if path.is_file()
                else sorted(each.name for each in path.iterdir()),
                path.lstat().st_mode,
                path.lstat().st_mtime_ns,
                path.lstat().st_size,
            )
            for path in sorted([self.folder, *self.folder.rglob("*")])
        }


def planted(archive, name, kind, victim):
    """Add an entry to an archive."""
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.SYMTYPE, 0o755
    if kind == "pipe":
        entry.type = tarfile.FIFOTYPE
    elif kind == "directory":
        entry.type = tarfile.DIRTYPE
    elif kind == "hard link":
        # A hard link of an archive leads to a file that is there after unpacking.
        entry.type = tarfile.REGTYPE
        archive.addfile(entry, io.BytesIO())
        return True
    else:
        targets = {"link": victim.file, "dead link": victim.folder / "made"}
        entry.linkname = str(targets.get(kind, victim.folder / "directory"))
    archive.addfile(entry)
    return False


def unpacked(folder, clean, names, kind, victim):
    """A copy of the store `clean` from an archive; its files `names` are of another kind."""
    place = folder / "unpacked"
    shutil.rmtree(place, ignore_errors=True)
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for path in sorted(clean.rglob("*")):
            name = f"store/{path.relative_to(clean)}"
            if not any(name == each or name.startswith(each + "/") for each in names):
                archive.add(path, name, recursive=False)
        hard = [name for name in names if planted(archive, name, kind, victim)]
    data.seek(0)
    with tarfile.open(fileobj=data) as archive:
        archive.extractall(place, filter="fully_trusted")
    for name in hard:
        (place / name).unlink()
        os.link(victim.file, place / name)
    return place / "store"


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """Two finished stores, the second with a split, and a text to append."""
    folder = tmp_path_factory.mktemp("clean")
    text = folder / "text.txt"
    text.write_text("".join(f"line {number}\n" for number in range(40)))
    for name, split in (("one", None), ("two", "hash:0.5")):
        penstock.build(
            Texts([f"text {number}" for number in range(40)]),
            folder / name,
            tokenizer="bytes",
            documents="lines",
            split=split,
        )
    return folder


def attempts(folder, clean, cases):
    """Run each case (names, kind, verb, split) on its own store; returns what each printed.

    Nothing outside of the stores may change, and nothing may take for ever.
    """
    made = []
    for number, (names, kind, verb, split) in enumerate(cases):
        place = folder / str(number)
        victim = Victim(place)
        store = unpacked(place, clean / ("two" if split else "one"), names, kind, victim)
        victim.before = victim.state()  # a hard link changes the number of names
        made.append((victim, [str(store), verb, str(clean / "text.txt"), split]))
    lines = "".join(json.dumps(case) + "\n" for _, case in made)
    command = ["-c", RUN]
    done = zygote.run(command, input=lines, capture_output=True, text=True, timeout=60 + len(made))
    said = done.stdout.splitlines()
    assert len(said) == len(cases), done.stderr
    for (victim, _), case, line in zip(made, cases, said, strict=True):
        assert victim.state() == victim.before, (case, line)
    return said


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_whose_every_extra_file_is_a_trap_changes_nothing_outside(tmp_path, clean, kind):
    present = {f"store/{path.name}" for path in (clean / "one").iterdir()}
    names = [f"store/{name}" for name in FILES if f"store/{name}" not in present]
    few = [name for name in names if not name.startswith(("store/.building", "store/.slice"))]
    traps = [[*names, "store/.rows"], [*few, "store/.rows"]]
    verbs = ("append", "stream", "read")
    cases = [(each, kind, verb, None) for each in traps for verb in verbs]
    said = attempts(tmp_path, clean, cases)
    # Without a false journal in the way, a store can be read and appended to. A directory with the
    # name of a new file is in the way.
    assert said[5] == "done"
    assert said[3] == "done" or kind == "directory"


def test_a_directory_that_is_a_link_is_not_written(tmp_path, clean):
    names = ["store/train", "store/val", ".store.new", "store/.rows"]
    cases = [
        ([name], "link to a directory", verb, "hash:0.5")
        for verb in ("append", "overwrite")
        for name in names
    ]
    said = attempts(tmp_path, clean, cases)
    assert "StoreError" in said[0]
    assert "StoreError" in said[1]
    assert said[2:4] == ["done", "done"]  # an append does not use them
    assert "holds train" in said[4]
    assert "holds val" in said[5]
    assert "is a link to" in said[6]
    assert said[7] == "done"  # the link is removed with the old store


def test_a_pipe_in_place_of_a_file_is_an_error_and_not_a_wait(tmp_path, clean):
    manifest, tokens, journal = "penstock.json", "part-00000.tokens.npy", ".building.json"
    pairs = [(manifest, "read"), (manifest, "append"), (tokens, "read")]
    pairs += [(tokens, "verify"), (journal, "append"), (journal, "stream")]
    cases = [([f"store/{name}"], "pipe", verb, None) for name, verb in pairs]
    said = attempts(tmp_path, clean, cases)
    assert all("regular file" in line for line in [*said[:3], said[4]]), said
    beside = [
        ([".store.old"], "pipe", "overwrite", None),
        ([".store.lock"], "pipe", "append", None),
    ]
    assert "is a file, but a directory" in attempts(tmp_path / "beside", clean, beside)[0]
    assert "StoreError" in said[3]  # its size is compared first


@pytest.mark.torture
@pytest.mark.timeout(7_200)
@pytest.mark.parametrize("split", [None, "hash:0.5"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_store_changes_anything_outside_or_hangs(tmp_path, clean, kind, split, figure):
    folders = ["store/train/", "store/val/", "store/"] if split else ["store/"]
    names = [folder + name for folder in folders for name in FILES]
    names += ["store/train", "store/val", "store/.rows", *BESIDE]
    cases = [([name], kind, verb, split) for name in names for verb in VERBS]
    said = attempts(tmp_path, clean, cases)
    num_done = said.count("done")
    figure(f"{kind}, {split}: {len(said)} hostile stores, {num_done} used, the others refused")
