# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A scratch folder is on the disk of the output folder, and is deleted."""

from pathlib import Path

import pytest

from trl_dapo.run.scratch import scratch_folder


@pytest.mark.parametrize(
    ("output_dir", "parent"), [("there", "there"), ("there/new", "there"), ("new/run", ".")], ids=str
)
def test_a_scratch_folder_is_in_the_output_folder_or_where_that_will_be_made(tmp_path, output_dir, parent):
    # The output folder itself may be the only one that can be written to, or the mount of a disk of its own.
    (tmp_path / "there").mkdir()
    with scratch_folder(tmp_path / output_dir) as folder:
        assert Path(folder).parent == tmp_path / parent
        Path(folder, "file").write_text("something")
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]
