"""The endless generator of padded batches."""

import itertools
import json

import pytest
import torch

from penstock.chat.chat import Chat
from penstock.errors import ChatError, PlanError, ResumeError
from penstock.integrations.sft import SFTCollate, sft_data_generator


def row(number):
    return {
        "messages": [
            {"role": "user", "content": f"What is {number}?" + " Really?" * (number % 5)},
            {"role": "assistant", "content": f"It is {number}."},
        ]
    }


ROWS = [row(number) for number in range(10)]


@pytest.fixture(scope="module")
def chat(gpt2_chat):
    return Chat("nanochat", gpt2_chat)


def by_hand(rows, chat, pad, ignore):
    """The straightforward way: a row at a time, token by token."""
    rendered = [chat.render(each) for each in rows]
    width = max(map(len, rendered)) - 1
    inputs, targets = [], []
    for tokens, loss in rendered:
        tokens, loss = tokens.tolist(), loss.tolist()
        fill = width - len(tokens) + 1
        inputs.append(tokens[:-1] + [pad] * fill)
        kept = [t if m else ignore for t, m in zip(tokens[1:], loss[1:], strict=True)]
        targets.append(kept + [ignore] * fill)
    return torch.tensor(inputs), torch.tensor(targets)


@pytest.mark.parametrize("ignore", [-1, -100])
def test_batches_are_those_of_the_straightforward_way(chat, ignore):
    batches = sft_data_generator(ROWS, 4, chat, pad_token_id=7, ignore_index=ignore)
    seen = []
    order = itertools.cycle(range(10))
    for inputs, targets in itertools.islice(batches, 12):
        rows = [ROWS[next(order)] for _ in range(4)]
        expected = by_hand(rows, chat, 7, ignore)
        seen.append(((inputs, targets), expected))
    # At the end, because no batch is written again.
    assert all(torch.equal(a, b) for pair in seen for a, b in zip(*pair, strict=True))


def test_supervised_targets_decode_to_the_answers(chat, gpt2_chat):
    for number, (_, targets) in enumerate(itertools.islice(sft_data_generator(ROWS, 1, chat), 10)):
        said = gpt2_chat.decode(targets[targets != -1].numpy())
        assert said == f"It is {number}.<|assistant_end|>"


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_together_read_each_row_once_a_pass(chat, world_size):
    seen = []
    ranks = [
        sft_data_generator(ROWS, 2, chat, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    for _ in range(30):
        parts = [next(each)[1] for each in ranks]
        for line in range(2):  # rank r has rows r, r + w, …
            seen += [answered(part[line]) for part in parts]

    assert seen == [number % 10 for number in range(len(seen))]
    assert len({each.position for each in ranks}) == 1


def answered(targets):
    """The number that an answer of `ROWS` tells."""
    kept = targets[targets != -1].tolist()
    return _NUMBERS[tuple(kept)]


@pytest.fixture(autouse=True)
def _numbers(chat):
    for number, each in enumerate(ROWS):
        tokens, loss = chat.render(each)
        _NUMBERS[tuple(tokens[loss == 1].tolist())] = number


_NUMBERS: dict[tuple[int, ...], int] = {}


def test_a_run_goes_on_from_its_state_on_other_ranks(chat):
    whole = sft_data_generator(ROWS, 3, chat)
    expected = [answered(line) for _, targets in itertools.islice(whole, 20) for line in targets]
    first = sft_data_generator(ROWS, 3, chat)
    begun = [answered(line) for _, targets in itertools.islice(first, 4) for line in targets]
    state = first.state_dict()
    ranks = [sft_data_generator(ROWS, 1, chat, rank=rank, world_size=3) for rank in range(3)]
    for each in ranks:
        each.load_state_dict(state)
    for _ in range(16):
        begun += [answered(next(each)[1][0]) for each in ranks]

    assert begun == expected
    with pytest.raises(ResumeError, match="of 10 rows, but this one has 9"):
        sft_data_generator(ROWS[:9], 1, chat).load_state_dict(state)


def test_a_function_of_ones_own_may_render(chat):
    own = sft_data_generator(ROWS, 4, lambda each: tuple(chat.render(each)), pad_token_id=7)
    ours = sft_data_generator(ROWS, 4, chat, pad_token_id=7)
    lists = sft_data_generator(
        ROWS, 4, lambda each: tuple(a.tolist() for a in chat.render(each)), pad_token_id=7
    )
    for one, two, three in itertools.islice(zip(own, ours, lists, strict=False), 5):
        assert all(map(torch.equal, one, two))
        assert all(map(torch.equal, three, two))


def test_long_rows_are_cut_where_that_was_asked_for(chat):
    batches = sft_data_generator(ROWS, 10, chat, max_length=12)
    with pytest.warns(match="are longer than max_length=12 tokens .* have no target left"):
        inputs, targets = next(batches)
    whole, _ = next(sft_data_generator(ROWS, 10, chat))
    assert batches.num_truncated >= 10
    collate = SFTCollate(chat, max_length=12)
    with pytest.warns(match="of 10 conversations are longer than max_length=12") as caught:
        collate(ROWS), collate(ROWS)
    assert len(caught) == 1  # once, and counted on
    assert collate.num_truncated == 20
    with pytest.raises(PlanError, match=r"chat='chatml' is neither a penstock.Chat nor a function"):
        sft_data_generator(ROWS, 1, chat="chatml")

    assert inputs.shape == targets.shape == (10, 11)
    assert torch.equal(inputs, whole[:, :11])


def test_rows_without_anything_to_train_on_are_counted(chat):
    silent = {"messages": [ROWS[0]["messages"][0], {**ROWS[0]["messages"][1], "train": False}]}
    batches = sft_data_generator([ROWS[0], silent], 2, chat)
    _, targets = next(batches)

    assert (targets[1] == -1).all()
    assert batches.num_untrained == 1


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.torture)])
def test_collate_works_in_a_dataloader_with_workers(gpt2_chat, method):
    """Sent to processes that are not forked, where each makes a chat of its own."""
    collate = SFTCollate(Chat("nanochat", "gpt2", add_tokens="auto"), pad_token_id=7)
    loader = torch.utils.data.DataLoader(
        ROWS, batch_size=5, collate_fn=collate, num_workers=1, multiprocessing_context=method
    )
    for (inputs, targets), start in zip(loader, (0, 5), strict=True):
        expected = by_hand(ROWS[start : start + 5], collate.chat, 7, -1)
        assert torch.equal(inputs, expected[0])
        assert torch.equal(targets, expected[1])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"rank": 2, "world_size": 2}, "rank=2"),
        ({"rank": 1}, "give both or neither"),
        ({"world_size": 2}, "give both or neither"),
        ({"max_length": 1}, "max_length=1"),
        ({"ignore_index": 0}, "may be a token"),
        ({"pad_token_id": -1}, "pad_token_id=-1"),
        ({"dataset": []}, "empty"),
        ({"chat": lambda each: ([], [])}, "pad_token_id=None"),
    ],
)
def test_arguments_that_cannot_work_are_refused(chat, options, told):
    given = {"dataset": ROWS, "batch_size": 2, "chat": chat, **options}

    with pytest.raises(PlanError, match=told):
        sft_data_generator(
            given.pop("dataset"), given.pop("batch_size"), given.pop("chat"), **given
        )


def test_a_row_that_is_no_conversation_is_named(chat):
    with pytest.raises(ChatError, match=r"Row 0 of the dataset.*not a known format"):
        next(sft_data_generator([{"text": "no"}], 1, chat))


@pytest.mark.parametrize(
    ("rendered", "told"),
    [
        (([1, 2, 3], [0, 1]), r"Row 3.*3 tokens and a mask of 2"),
        (([1, 2], [0, 1, 1]), r"Row 3.*2 tokens and a mask of 3"),
        (([], []), r"Row 3.*no tokens"),
        (([[1, 2]], [[0, 1]]), r"Row 3.*\(1, 2\)"),
        (([1.5, 2.5], [0, 1]), r"Row 3.*float64"),
        ("no pair of two", r"Row 3.*pair of tokens and mask"),
    ],
)
def test_what_a_function_of_ones_own_gets_wrong_is_told_with_its_row(rendered, told):
    def render(row):
        return rendered if row == 3 else ([1, 2, 3, 4], [0, 0, 1, 1])

    with pytest.raises(ChatError, match=told):
        next(sft_data_generator(list(range(6)), 2, render, pad_token_id=7))
    with pytest.raises(ChatError, match=told.replace("Row 3", "Row 1")):
        SFTCollate(render, pad_token_id=7)([2, 3])


CHANGES = [{"position": -7}, {"position": 3}, {"position": True}, {"num_rows": 2}, {"check": None}]


@pytest.mark.parametrize("change", [*CHANGES, {"more": 1}])
def test_a_state_that_was_changed_is_refused(chat, change):
    batches = sft_data_generator(ROWS, 2, chat)
    next(batches)
    state = json.loads(json.dumps(batches.state_dict()))

    with pytest.raises(ResumeError, match="was changed after it was written"):
        batches.load_state_dict(state | change)
    assert batches.position == 2
    batches.load_state_dict(state)


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (None, "is not the state of SFT batches"),
        ({}, "is not the state of SFT batches"),
        ({"position": 2, "num_rows": 10}, "is not the state of SFT batches"),
        ({"version": 99, "position": 2, "num_rows": 10, "check": ""}, "of version 99; this"),
    ],
)
def test_what_is_no_state_is_refused(chat, state, told):
    with pytest.raises(ResumeError, match=told):
        sft_data_generator(ROWS, 2, chat).load_state_dict(state)
