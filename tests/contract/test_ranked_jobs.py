"""The runner of checks on ranks: a failure is reported where it happened, and nothing can hang."""

from __future__ import annotations

from . import ranked_jobs
from .ranked_jobs import run_job

PASSES, FAILS, HANGS = (f"{__package__}.runner_checks:{name}" for name in ("Passes", "FailsOnOne", "Hangs"))


def test_a_failure_on_one_rank_stops_the_job_and_shows_its_output(platform_name):
    verdicts = run_job(platform_name, 2, [PASSES, FAILS, HANGS])
    assert list(verdicts) == [PASSES, FAILS]
    assert verdicts[PASSES] == ""
    assert "---- rank 1 of 2: Traceback" in verdicts[FAILS]
    assert "only rank 1 is unhappy" in verdicts[FAILS]
    assert "rank 0 of 2" not in verdicts[FAILS]
    assert "rank 1 says hello" in verdicts[FAILS]


def test_a_rank_that_hangs_is_ended_and_shows_where(platform_name, monkeypatch):
    monkeypatch.setattr(ranked_jobs, "JOB_LIMIT_S", 10)
    monkeypatch.setattr(ranked_jobs, "GRACE_S", 600)
    verdicts = run_job(platform_name, 2, [HANGS])
    assert "rank 0 of 2: no verdict: this rank did not finish the check" in verdicts[HANGS]
    assert "Timeout (0:00:10)!" in verdicts[HANGS]
    assert "runner_checks.py" in verdicts[HANGS]


def test_a_launcher_that_hangs_is_killed(platform_name, monkeypatch):
    monkeypatch.setattr(ranked_jobs, "GRACE_S", 0)
    monkeypatch.setattr(ranked_jobs, "JOB_LIMIT_S", 1)
    verdicts = run_job(platform_name, 2, [HANGS])
    assert "the processes were killed after 1 s" in verdicts[HANGS]
