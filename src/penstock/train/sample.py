"""A sample of text that a trained model writes."""

import torch

from penstock.digest import derive_key
from penstock.errors import MissingTokenizerError, TrainError
from penstock.store.reader import TokenStore
from penstock.train.config import TrainingJob
from penstock.train.model import GPT

_TEMPERATURE = 0.8  # below 1, likely tokens become more likely
_TOP_K = 50


def sample_text(job: TrainingJob, model: GPT, named: str | None) -> str:
    """A hundred tokens that the model generates, decoded with the tokenizer of the data.

    Args:
        job: The job, which has the data.
        model: The trained model.
        named: The tokenizer that the recipe names, for a store whose tokenizer was not loaded
            before; None if it names none.
    """
    rows = next(iter(job.plan.sources.values()))
    assert rows.stream is not None  # the rows of a recipe are read from stores or token files
    store = rows.stream.members[0]
    # The model may have more ids than the tokenizer, and these have no text.
    try:
        tokenizer = store.load_tokenizer()  # needs packages that training does not
    except MissingTokenizerError as error:
        if named is None:
            is_store = isinstance(store, TokenStore)
            advice = " In a recipe, that is data.tokenizer." if is_store else ""
            raise TrainError(f"{error}{advice}") from None
        tokenizer = store.load_tokenizer(named)
    # The end token precedes the first token of every document but the first, so after it the model
    # writes the beginning of a document.
    end = store.manifest.contents["eos_id"] if isinstance(store, TokenStore) else None
    first = [int(rows.stream.tokens(0, 1)[0] if end is None else end)]
    tokens = generate(model, first, num_tokens=100, vocab_size=tokenizer.vocab_size)
    return tokenizer.decode(tokens[len(first) :])


@torch.no_grad()
def generate(
    model: GPT,
    tokens: list[int],
    *,
    num_tokens: int = 100,
    seed: int = 0,
    vocab_size: int | None = None,
) -> list[int]:
    """`tokens`, continued by the model; the same seed draws the same tokens.

    Args:
        model: A model, which is left in the mode it was in: training or evaluation.
        tokens: The beginning, at least one token.
        num_tokens: The number of tokens to add.
        seed: The seed of the draws.
        vocab_size: Draw ids below this number, if the tokenizer has fewer than the model.

    Raises:
        TrainError: the logits are not finite.
    """
    device = model.token_embedding.weight.device
    # A separate generator is used, so that the state of torch's global one does not change.
    generator = torch.Generator(device).manual_seed(derive_key("sample", seed) >> 1)
    was_training = model.training
    model.eval()
    written = torch.tensor([tokens], device=device)
    try:
        for _ in range(num_tokens):
            # There is no cache of keys and values: for a hundred tokens it is not worth its code.
            # The model was trained on rows of `length` tokens, so it sees the last ones.
            logits = model(written[:, -model.config.length :])[0, -1, :vocab_size].float()
            if not bool(logits.isfinite().all()):
                raise TrainError(
                    "The logits of the model are not finite, so no token can be drawn."
                )
            likeliest, ids = (logits / _TEMPERATURE).topk(min(_TOP_K, len(logits)))
            drawn = torch.multinomial(likeliest.softmax(0), 1, generator=generator)
            written = torch.cat([written, ids[drawn][None]], dim=1)
    finally:
        model.train(was_training)
    return [int(each) for each in written[0]]
