"""Marks for tests that the lowest torch of pyproject.toml cannot run."""

import pytest
import torch

HAS_FSDP_ON_CPUS = "record_event" in vars(torch.cpu.Stream)
needs_fsdp = pytest.mark.skipif(
    not HAS_FSDP_ON_CPUS, reason="FSDP2 works on CPUs with torch 2.7 or later"
)
