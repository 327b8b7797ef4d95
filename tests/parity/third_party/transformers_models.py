"""Hugging Face's models over items instead of words."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MambaConfig,
    MambaModel,
    T5Config,
    T5EncoderModel,
)

from tests.parity.third_party.training import CATALOGUE, DIM, ITEMS, LENGTH, RATES, Training, ranking_loss

SIZES = {
    "hidden_size": DIM,
    "intermediate_size": 2 * DIM,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
}


class LlamaTraining(Training):
    """The next item, at every position; rows of a table of our own go in, so the model's own table is not used."""

    package = "transformers"
    tables = ("item_embedding",)
    options = {"find_unused_parameters": True}

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.item_embedding = nn.Embedding(ITEMS, DIM, padding_idx=0)
        self.model = LlamaModel(LlamaConfig(vocab_size=1, bos_token_id=None, eos_token_id=None, **SIZES))

    def states(self, items: Tensor) -> Tensor:
        rows = self.item_embedding(items)
        return self.model(inputs_embeds=rows, attention_mask=(items != 0).long()).last_hidden_state

    def look_up(self, items: Tensor) -> Tensor:
        return self.item_embedding(items)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        states, there = self.states(batch["items"]), batch["items"] != 0
        return ranking_loss(states, self.look_up(batch["positive"]), self.look_up(batch["negative"]), there)


class LlamaOwnTable(LlamaTraining):
    """The model's own table holds the items.

    It begins at 0.2, as the config can say, not at 0.02: Llama's norm divides by that, so behind it rounding in a row would be
    fifty times as much.
    """

    tables = ("model.embed_tokens",)
    options = {}

    def __init__(self, optimizer: str) -> None:
        Training.__init__(self, optimizer)
        self.model = LlamaModel(LlamaConfig(vocab_size=ITEMS, initializer_range=0.2, **SIZES))

    def states(self, items: Tensor) -> Tensor:
        return self.model(input_ids=items, attention_mask=(items != 0).long()).last_hidden_state

    def look_up(self, items: Tensor) -> Tensor:
        return self.model.get_input_embeddings()(items)


class BertTraining(LlamaTraining):
    """The same over Bert, which sees later items as well; its dropout is on."""

    without_effect = ("attention.self.key.bias",)

    def __init__(self, optimizer: str) -> None:
        Training.__init__(self, optimizer)
        self.item_embedding = nn.Embedding(ITEMS, DIM, padding_idx=0)
        self.model = BertModel(BertConfig(vocab_size=1, **SIZES), add_pooling_layer=False)


class BertOwnTable(LlamaOwnTable):
    tables = ("model.embeddings.word_embeddings",)
    without_effect = BertTraining.without_effect

    def __init__(self, optimizer: str) -> None:
        Training.__init__(self, optimizer)
        self.model = BertModel(BertConfig(vocab_size=ITEMS, **SIZES), add_pooling_layer=False)


GPT2 = {"n_positions": LENGTH, "n_embd": DIM, "n_layer": 2, "n_head": 2, "n_inner": 2 * DIM}
"""Its dropout is on."""


class GPT2OwnTable(LlamaOwnTable):
    tables = ("model.wte",)
    without_effect = ("attn.c_attn.bias",)  # a third of it is the keys'

    def __init__(self, optimizer: str) -> None:
        Training.__init__(self, optimizer)
        self.model = GPT2Model(GPT2Config(vocab_size=ITEMS, bos_token_id=None, eos_token_id=None, **GPT2))


class MambaOwnTable(LlamaOwnTable):
    """The model's own table holds the items, and states go from one to the next."""

    tables = ("model.embeddings",)

    def __init__(self, optimizer: str) -> None:
        Training.__init__(self, optimizer)
        self.model = MambaModel(MambaConfig(vocab_size=ITEMS, hidden_size=DIM, state_size=4, num_hidden_layers=2))


class T5EncoderOwnTable(LlamaOwnTable):
    """The model has one weight in two modules: ``shared``, which looks targets up here, and ``encoder.embed_tokens``."""

    tables = ("model.shared", "model.encoder.embed_tokens")
    rates = {**RATES, "adagrad": 0.01}

    def __init__(self, optimizer: str) -> None:
        Training.__init__(self, optimizer)
        sizes = {"d_model": DIM, "d_kv": DIM // 2, "d_ff": 2 * DIM, "num_layers": 2, "num_heads": 2}
        self.model = T5EncoderModel(T5Config(vocab_size=ITEMS, **sizes))


class LlamaSoftmax(Training):
    """A causal language model over items, with its own loss; its output layer has the table's weight."""

    package = "transformers"
    tables = ("model.model.embed_tokens",)
    items = CATALOGUE
    softmax = True
    rates = {**RATES, "sgd": 0.3}

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        config = {"vocab_size": CATALOGUE, "tie_word_embeddings": True, **SIZES}
        self.model = LlamaForCausalLM(LlamaConfig(**config))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        there = batch["items"] != 0
        labels = batch["items"].masked_fill(~there, -100)
        return self.model(input_ids=batch["items"], attention_mask=there.long(), labels=labels).loss


class GPT2Softmax(LlamaSoftmax):
    """The same with dropout, and with the module that has the table in another place."""

    tables = ("model.transformer.wte",)
    without_effect = GPT2OwnTable.without_effect
    rates = RATES

    def __init__(self, optimizer: str) -> None:
        Training.__init__(self, optimizer)
        self.model = GPT2LMHeadModel(GPT2Config(vocab_size=CATALOGUE, bos_token_id=None, eos_token_id=None, **GPT2))
