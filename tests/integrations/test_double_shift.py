"""Labels that were shifted are not shifted again by a model of transformers, without an error.

A model that shifts them again learns the token after the next one. It is refused where the model
is visible: in Lightning's Trainer with a data module, and in `RowsTrainer` with any dataset.
"""

import pytest
import torch

pytest.importorskip("transformers", reason="needs penstock[hf]")

import transformers

from penstock import Texts, Windows, build
from penstock.errors import PlanError
from penstock.integrations.huggingface import RowItems, RowsTrainer
from penstock.integrations.pytorch import TransformerDataset

LENGTH = 16
REFUSED = r'labels="same"'


def make_model(kind="gpt2"):
    torch.manual_seed(0)
    common = {"vocab_size": 257, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2, **common
        )
        return transformers.GPT2LMHeadModel(config)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**shape, num_attention_heads=2, **common)
    )


def own_loss(model, batch):
    """The right loss of shifted labels, of the logits of the same model."""
    logits = model(batch["input_ids"]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"the quick brown fox number {n} jumps\n" for n in range(60)))
    return path


@pytest.fixture
def fit(text):
    """Trains a model for two steps on a data module, with the loss that is given."""
    lightning = pytest.importorskip("lightning", reason="needs penstock[lightning]")
    from penstock.integrations.lightning import LLMDataModule, LocalOpenWebTextDataModule

    class Module(lightning.LightningModule):
        def __init__(self, model, loss):
            super().__init__()
            self.model, self.loss = model, loss

        def training_step(self, batch, _):
            return self.loss(self.model, batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(labels=None, *, rows=False, loss=None, model=None):
        options = {} if labels is None else {"labels": labels}
        if rows:
            data = LLMDataModule("bytes", 4, LENGTH, data={"train": text}, num_workers=0, **options)
        else:
            data = LocalOpenWebTextDataModule(
                text, text, tokenizer="bytes", max_length=LENGTH, batch_size=4, **options
            )
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_steps=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
        )
        model = make_model() if model is None else model
        module = Module(model, loss or (lambda model, batch: model(**batch).loss))
        try:
            trainer.fit(module, datamodule=data)
        finally:
            data.teardown("fit")
        return trainer.global_step

    return fit


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers and loggers
class TestLightning:
    @pytest.mark.parametrize("kind", ["gpt2", "llama"])
    def test_a_model_that_shifts_labels_again_is_refused(self, fit, kind):
        with pytest.raises(PlanError, match=REFUSED):
            fit(model=make_model(kind))

    def test_so_is_it_with_rows_of_text(self, fit):
        with pytest.raises(PlanError, match=REFUSED):
            fit("shifted", rows=True)

    @pytest.mark.parametrize("rows", [False, True])
    def test_labels_that_are_the_same_are_trained_on(self, fit, rows):
        assert fit("same", rows=rows) == 2

    def test_so_are_shifted_labels_with_their_own_loss(self, fit):
        assert fit(loss=own_loss) == 2

    def test_an_adapter_is_refused_too(self, fit):
        """It calls `forward` of the model inside it, which runs no hook of that model."""
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"])
        with pytest.raises(PlanError, match=REFUSED):
            fit(model=peft.get_peft_model(make_model(), config))
        assert fit(model=peft.get_peft_model(make_model(), config), loss=own_loss) == 2


class PlainTrainer(RowsTrainer, transformers.Trainer):
    """A Trainer with the mixin."""


class OwnLossTrainer(PlainTrainer):
    def compute_loss(self, model, inputs, *_, **__):
        return own_loss(model, inputs)


def arguments_of(folder):
    return transformers.TrainingArguments(
        str(folder),
        max_steps=1,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )


@pytest.mark.parametrize("side", ["train", "eval"])
@pytest.mark.parametrize("labels", ["shifted", "same"])
@pytest.mark.parametrize("kind", ["dataset", "items"])
def test_the_trainer_refuses_shifted_labels(text, tmp_path, kind, labels, side):
    pytest.importorskip("accelerate", reason="needs penstock[hf]")
    if kind == "dataset":
        dataset = TransformerDataset(text, "bytes", LENGTH, is_jsonl=False, labels=labels)
    else:
        store = build(Texts(text.read_text().splitlines()), tmp_path / "s", tokenizer="bytes")
        dataset = RowItems(Windows(store, LENGTH), labels=labels)
    trainer = PlainTrainer(
        model=make_model(), args=arguments_of(tmp_path), **{f"{side}_dataset": dataset}
    )
    run = trainer.train if side == "train" else trainer.evaluate
    if labels == "shifted":
        with pytest.raises(PlanError, match=REFUSED):
            run()
    else:
        run()


def test_a_trainer_with_its_own_loss_takes_shifted_labels(text, tmp_path):
    pytest.importorskip("accelerate", reason="needs penstock[hf]")
    dataset = TransformerDataset(text, "bytes", LENGTH, is_jsonl=False)
    trainer = OwnLossTrainer(model=make_model(), args=arguments_of(tmp_path), train_dataset=dataset)

    assert trainer.train().global_step == 1
