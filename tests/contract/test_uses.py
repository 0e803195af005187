"""Every line of use on the page of the contract runs as it is shown, on two ranks."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.core.overlap import HookCoordinator
from hyper_parallel.errors import UnsupportedMemberError
from hyper_parallel.platform.platform import ParameterLayout
from scripts import docs_platform

from .marks import on_ranks
from .models import models_for
from .test_coverage import MEMBERS
from .worker import World

LEAVING = "The end"


def names_for(world: World) -> dict[str, object]:
    """What the lines may name."""
    adapter = world.adapter
    return {
        "platform": world.platform,
        "rank": world.rank,
        "peer": 1 - world.rank,
        "x": adapter.tensor(np.arange(8, dtype=np.float32).reshape(2, 4) + world.rank),
        "weight": world.platform.Parameter(adapter.tensor(np.ones((4, 4), np.float32))),
        "model": models_for(adapter).small(),
        "fn": lambda tensor: tensor * tensor,
        "path": world.fresh_path("uses"),
        "HookCoordinator": HookCoordinator,
        "ParameterLayout": ParameterLayout,
    }


@on_ranks(2)
def test_every_line_runs(world: World):
    names = names_for(world)
    for title, members in docs_platform.GROUPS.items():
        if title == LEAVING:  # other checks run in this world
            continue
        for member, use in members.items():
            if use.rank is not None and use.rank != world.rank:
                continue
            code = compile(use.line, f"use of {member}", "exec")
            if use.refused_on == world.adapter.name:
                with pytest.raises(UnsupportedMemberError, match=member):
                    exec(code, names)
            else:
                exec(code, names)


def test_every_member_has_a_line_that_names_it():
    shown = {member: use for members in docs_platform.GROUPS.values() for member, use in members.items()}
    assert sorted(shown) == sorted(MEMBERS)
    assert sum(map(len, docs_platform.GROUPS.values())) == len(MEMBERS)
    assert [member for member, use in shown.items() if f"platform.{member}" not in use.line] == []


def test_the_page_shows_signatures_docstrings_and_lines():
    page = docs_platform.on_page_markdown("<!-- platform: members -->")
    assert "#### `all_reduce(data, group_info, async_op=False)`" in page
    assert "The sum over ranks, in place on `data`; `(data, handle)` when async." in page
    assert "platform.send_object_list(['step', 3], dst=1)  # on rank 0" in page
    assert "transform = platform.get_tensor_transform()  # refused by name on torch" in page
