"""What a step does otherwise on a GPU, tried on a CPU: stops and buffers."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import ResNetConfig, ResNetForImageClassification

from recipe.runtime import distribution
from recipe.training import interruptions
from tests.support.packed_batches import make


def test_buffers_are_sent_where_a_step_changes_them() -> None:
    small = {"embedding_size": 4, "hidden_sizes": [4], "depths": [1], "num_labels": 2}
    assert distribution.has_changing_buffers(ResNetForImageClassification(ResNetConfig(**small)))
    assert not distribution.has_changing_buffers(make("bert"))
    module = torch.nn.Module()
    module.register_buffer("mean", torch.zeros(2), persistent=False)
    assert not distribution.has_changing_buffers(module)
    module.register_buffer("sum", torch.zeros(2))
    assert distribution.has_changing_buffers(module)


@pytest.mark.parametrize(("seconds", "most"), [(0.001, 16), (0.2, 2), (3.0, 1)])
def test_a_stop_is_agreed_on_in_time(
    seconds: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on each of many short steps, and on each of long ones."""

    class Group:
        """Other processes that take so long for a step, one of which is asked to stop in one of its."""

        def __init__(self, asked_at: int = 10**9) -> None:
            self.asked_at, self.step, self.polls = asked_at, 0, 0

        def all_reduce(self, flags: Tensor, **_: Any) -> None:
            self.polls += 1
            flags[0] = max(int(flags[0]), int(self.step >= self.asked_at))

    now, group = [0.0], Group(asked_at=100)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(interruptions.dist, "all_reduce", group.all_reduce)
    monkeypatch.setattr(interruptions.dist, "get_rank", lambda: 1)
    asking = interruptions.Interruptions(None)
    asking._group = "of hosts"
    stopped = False
    while not stopped:
        group.step += 1
        now[0] += seconds
        stopped, _ = asking._agreed("step")
    assert 100 <= group.step < 100 + most
    assert group.step / most <= group.polls <= group.step / most + 8
    # A batch of an evaluation may take longer than all of them: they ask after the first.
    polls, group.asked_at = group.polls, 0
    now[0] += 30
    assert asking._agreed("evaluation")[0]
    assert group.polls == polls + 1
