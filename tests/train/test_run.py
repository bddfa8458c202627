"""The folder of a run belongs to one process at a time."""

import multiprocessing
from pathlib import Path

import pytest

from hirank.errors import HirankError
from hirank.train.run import RunConfig, alone_in, claim_run_dir, cleared_on_failure


def _refused(folder: Path) -> bool:
    try:
        with alone_in(folder):
            return False
    except HirankError:
        return True


def test_a_second_process_is_refused_until_the_first_is_done(tmp_path):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        with alone_in(tmp_path):
            assert pool.apply(_refused, (tmp_path,))
        assert not pool.apply(_refused, (tmp_path,))


def test_a_failed_first_run_leaves_not_even_the_folder_of_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_dir = claim_run_dir(RunConfig())
    with pytest.raises(HirankError), cleared_on_failure(run_dir, new=True):
        raise HirankError("no.")
    assert list(tmp_path.iterdir()) == []
