"""One data folder, one process; private; and one clear sentence when it cannot be had."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from cache_store.errors import DataFolderBusy, DiskRefused
from cache_store.folder import DataFolder

ROOT = Path(__file__).parents[2]

HOLD = """
import sys
from pathlib import Path
from cache_store.folder import DataFolder
folder = DataFolder(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""

TRY_UNPRIVILEGED = """
import os, sys
from pathlib import Path
from cache_store.errors import DiskRefused
from cache_store.folder import DataFolder
DataFolder(Path(sys.argv[1])).close()  # imports everything while that is still allowed
if os.getuid() == 0:  # nothing is forbidden to root
    os.setgid(65534)
    os.setuid(65534)
for path in sys.argv[2:]:
    try:
        DataFolder(Path(path))
    except DiskRefused as refused:
        print(refused)
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such permissions")
def test_everything_is_created_for_the_owner_only(tmp_path: Path) -> None:
    with DataFolder(tmp_path / "deep" / "data") as folder:
        made = [folder.path, folder.models, folder.kv, folder.temporary]
        assert [path.stat().st_mode & 0o777 for path in made] == [0o700] * 4
        assert (folder.path / "lock").stat().st_mode & 0o777 == 0o600
        assert folder.database.parent == folder.path
        assert not folder.database.exists()


def test_folders_are_created_only_when_they_are_asked_for(tmp_path: Path) -> None:
    with DataFolder(tmp_path / "data") as folder:
        assert [path.name for path in folder.path.iterdir()] == ["lock"]
        assert folder.kv.is_dir()
        assert folder.kv.is_dir()


def test_a_second_keepwarm_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    with DataFolder(tmp_path), pytest.raises(DataFolderBusy, match="Another Keepwarm is using"):
        DataFolder(tmp_path)
    DataFolder(tmp_path).close()


def test_a_second_process_is_refused_until_the_first_one_ends_even_by_a_kill(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(DataFolderBusy):
            DataFolder(tmp_path)
        other.kill()
    DataFolder(tmp_path).close()


def test_another_thread_may_close_the_folder(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path)
    closer = threading.Thread(target=folder.close)
    closer.start()
    closer.join(30)
    with DataFolder(tmp_path) as free_again:
        assert free_again.path == folder.path
    folder.close()


def test_a_file_in_the_way_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("mine")
    for path in (tmp_path / "data", tmp_path / "data" / "below"):
        with pytest.raises(DiskRefused, match="cannot write") as caught:
            DataFolder(path)
        assert str(path) in str(caught.value)
    assert (tmp_path / "data").read_text() == "mine"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such permissions")
def test_a_folder_that_may_not_be_written_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as outside:  # pytest's own folder is closed to other users
        Path(outside).chmod(0o711)
        closed = Path(outside) / "closed"
        closed.mkdir()
        closed.chmod(0o555)
        done = subprocess.run(
            [sys.executable, "-c", TRY_UNPRIVILEGED, str(tmp_path), str(closed), str(closed / "new")],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert list(closed.iterdir()) == []
    sentences = done.stdout.splitlines()
    assert len(sentences) == 2
    assert all("Permission denied" in sentence and str(closed) in sentence for sentence in sentences)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such permissions")
def test_a_folder_that_was_there_keeps_its_permissions(tmp_path: Path) -> None:
    common = tmp_path / "common"
    common.mkdir()
    common.chmod(0o755)
    with DataFolder(common) as folder:
        assert common.stat().st_mode & 0o777 == 0o755
        assert folder.kv.stat().st_mode & 0o777 == 0o700
