from __future__ import annotations

import torch

from drift_sdk.execution.device.memory import Workspace

CPU = torch.device("cpu")


def test_requests_for_one_buffer_share_memory() -> None:
    workspace = Workspace(CPU)
    large = workspace.take("sums", (4, 8), torch.float32)
    small = workspace.take("sums", (2, 8), torch.bfloat16)
    assert large.shape == (4, 8) and small.shape == (2, 8) and small.dtype == torch.bfloat16
    assert small.data_ptr() == large.data_ptr()
    assert workspace.take("sums", (4, 8), torch.float32) is large
    assert workspace.take("others", (4, 8), torch.float32).data_ptr() != large.data_ptr()


def test_buffer_that_grows_serves_all_later_requests() -> None:
    """Captured graphs still write to the outgrown one."""
    workspace = Workspace(CPU)
    before = workspace.take("sums", (2, 8), torch.float32)
    other = workspace.take("others", (2, 8), torch.float32)
    before.fill_(1.0)
    grown = workspace.take("sums", (4, 8), torch.float32)
    assert grown.data_ptr() != before.data_ptr()
    assert workspace.take("sums", (2, 8), torch.float32).data_ptr() == grown.data_ptr()
    assert workspace.take("others", (2, 8), torch.float32) is other
    grown.zero_()
    assert bool((before == 1.0).all())
