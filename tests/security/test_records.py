"""The planner's records as files from others: what the fuzzer found, by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.errors import PlanError
from hyper_parallel.planner.plan import Plan
from hyper_parallel.planner.profile import Profile
from security.planner_samples import small_plan, small_profile


@pytest.mark.parametrize("kind", [Profile, Plan])
def test_a_number_that_fits_no_float_is_refused(tmp_path: Path, kind: Any) -> None:
    path = tmp_path / "record"
    (small_profile() if kind is Profile else small_plan()).save(path)
    field = "step_seconds"
    data = json.loads(path.read_text())
    holder = data["measured"] if kind is Profile else data["predicted"]
    assert field in holder
    holder[field] = 10**400
    path.write_text(json.dumps(data))
    with pytest.raises(PlanError, match=rf"{kind.__name__}.load: .*/record .*step_seconds"):
        kind.load(path)


@pytest.mark.parametrize("kind", [Profile, Plan])
def test_a_record_that_is_no_file_is_refused(tmp_path: Path, kind: Any) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # reading it would wait for ever
    for path in (tmp_path, pipe, tmp_path / "nothing"):
        with pytest.raises(PlanError, match=rf"{kind.__name__}.load: .*{path.name}"):
            kind.load(path)
