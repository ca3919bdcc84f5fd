"""Models of Hugging Face's transformers from a configuration: cut as they are, they train as in one plain process."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cuts import Batch, Compared, seeded
from torch import Tensor, nn

from engine.targets import build, locate
from models.library import LogitsLoss

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="needs the extra transformers"),
    pytest.mark.filterwarnings("ignore"),  # of the library, about kernels and tokens
]
CONF = Path(__file__).parents[2] / "conf" / "model"
SMALL = {
    "gpt2": {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_head": 2}
    | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "llama": {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2,
              "num_key_value_heads": 1},
    "mamba": {"vocab_size": 11, "hidden_size": 8, "state_size": 4},
    "bert": {"vocab_size": 11, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16}
    | dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    "t5": {"vocab_size": 11, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_heads": 2, "dropout_rate": 0.0},
    "vit": {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16, "image_size": 8, "patch_size": 4},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model(name: str) -> Callable[[], nn.Module]:
    """The model of conf/model/NAME.yaml, made small."""
    section = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    config = section["config"] | SMALL[name]

    def make() -> nn.Module:
        made: nn.Module = locate(section["_target_"])(build(config, where="model.config"))
        return made

    return seeded(make)


def batches(name: str, rows: int = 4) -> list[Batch]:
    g = torch.Generator().manual_seed(1)

    def words() -> Tensor:
        return torch.randint(1, 11, (rows, 6), generator=g)

    if name == "vit":
        pictures = torch.randn(2, rows, 3, 8, 8, generator=g, dtype=torch.float64)
        return [(picture, torch.randint(10, (rows,), generator=g)) for picture in pictures]
    if name == "bert":  # the second half of the samples is padded
        seen = torch.ones(rows, 6, dtype=torch.int64)
        seen[rows // 2 :, 4:] = 0
        return [({"input_ids": words(), "attention_mask": seen}, words().masked_fill(seen == 0, -100)) for _ in "ab"]
    if name == "t5":
        return [({"input_ids": words(), "decoder_input_ids": words()}, words()) for _ in "ab"]
    return [(words(), words()) for _ in "ab"]


# What is computed in float32 inside: Mamba's scan, T5's and Llama's normalisation, ViT's and BERT's in float64 too.
FLOAT32 = {"mamba", "llama", "t5"}


@pytest.mark.parametrize(
    ("name", "schedule", "ranks", "replicas"),
    [*((name, "1f1b", 2, 1) for name in SMALL), ("gpt2", "zb_v", 2, 2), ("t5", "gpipe", 3, 1)],
)
@pytest.mark.slow(keep=2)
def test_trains_as_in_one_process(name: str, schedule: str, ranks: int, replicas: int) -> None:
    made = Compared(model(name), LogitsLoss(), batches(name, 4 * replicas), ranks, replicas, schedule=schedule)
    made.check(1e-6 if name in FLOAT32 else 1e-9)
