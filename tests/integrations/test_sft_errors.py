"""A conversation that cannot be rendered is named, wherever the rows that are made ahead end."""

import pytest

from penstock.chat.chat import Chat
from penstock.errors import ChatError, PlanError
from penstock.integrations.sft import sft_data_generator

GOOD = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 2)])
@pytest.mark.parametrize("num_rows", [8, 512, 600])
def test_the_row_that_cannot_be_rendered_is_named(gpt2_chat, num_rows, rank, world_size):
    dataset = [GOOD] * num_rows
    dataset[5] = {"text": "no"}
    batches = sft_data_generator(
        dataset, 2, Chat("chatml", gpt2_chat), rank=rank, world_size=world_size
    )

    with pytest.raises(ChatError, match=r"^Row 5 of the dataset, counting from 0: The record has"):
        next(batches)


def test_a_path_is_not_taken_for_conversations(gpt2_chat):
    with pytest.raises(PlanError, match=r"'chats\.jsonl' must be rows, not a path"):
        sft_data_generator("chats.jsonl", 2, Chat("chatml", gpt2_chat))


def test_what_a_function_of_ones_own_cannot_render_is_named():
    def render(row):
        if row == 4:
            raise ChatError("no_messages", "There is nothing to say.")
        return [1, 2], [0, 1]

    with pytest.raises(ChatError, match=r"^Row 4 of the dataset, .*nothing to say"):
        next(sft_data_generator(list(range(7)), 3, render, pad_token_id=7))
