"""The libraries are compiled once, with whatever compiler there is, and a clear word when there is none."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpuherd.errors import CannotWrite, GpuherdError
from gpuherd.standin import driver
from gpuherd.standin.state import LAYOUT_VERSION


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gpuherd"


def soname(library: Path) -> bool:
    return library.name.encode() + b"\0" in library.read_bytes()


def test_compiles_once(empty_cache: Path) -> None:
    folder = driver.library_folder()
    assert folder.parent == empty_cache
    assert sorted(path.name for path in folder.iterdir()) == [
        "libamd_smi.so",
        "libcuda.so",
        "libcuda.so.1",
        "libnvidia-ml.so",
        "libnvidia-ml.so.1",
    ]
    before = (folder / driver.NVML).stat()
    assert driver.library_folder() == folder
    assert (folder / driver.NVML).stat() == before
    assert list(empty_cache.iterdir()) == [folder]


def test_many_at_once_get_the_same_whole_folder(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a compiler that writes any library at once: what is compiled does not matter here."""
    (tmp_path / "bin").mkdir()
    quick = tmp_path / "bin" / "cc"
    quick.write_text('#!/bin/sh\nuntil [ "$1" = -o ]; do shift; done\nsleep 0.05\necho library >"$2"\n')
    quick.chmod(0o755)
    monkeypatch.setenv("PATH", f"{quick.parent}:{os.environ['PATH']}")
    code = "from gpuherd.standin import driver; print(driver.library_folder())"
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ)
        for _ in range(4)
    ]
    folders = {process.communicate()[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0] * 4
    assert folders == {str(driver.library_folder())}
    assert len(list(empty_cache.iterdir())) == 1


def test_compiles_without_warnings(tmp_path: Path) -> None:
    words = driver.compiler()
    assert words is not None
    for source in ("nvml.c", "amdsmi.c", "cuda.c"):
        path = Path(driver.__file__).with_name(source)
        flags = ["-std=c99", "-D_GNU_SOURCE", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
        subprocess.run([*words, *flags, "-o", str(tmp_path / "out.so"), str(path)], check=True)


def test_the_ziglang_wheel_compiles_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without linking, for which zig first compiles a library of its own."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("HOME", str(tmp_path / "no-home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = driver.compiler()
    assert words == [sys.executable, "-m", "ziglang", "cc"]
    for source in driver._SOURCES.values():
        made = tmp_path / f"{source}.o"
        path = Path(driver.__file__).with_name(source)
        flags = [each for each in driver._FLAGS if each != "-shared"]
        subprocess.run([*words, *flags, "-c", "-o", str(made), str(path)], check=True)
        assert made.stat().st_size > 0


@pytest.mark.slow
def test_the_ziglang_wheel_is_compiler_enough(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("HOME", str(empty_cache / "no-home"))
    assert driver.compiler() == [sys.executable, "-m", "ziglang", "cc"]
    folder = driver.library_folder()
    assert soname(folder / driver.NVML)
    assert soname(folder / driver.CUDA)
    told = (ctypes.c_uint32 * 8)()
    ctypes.CDLL(str(folder / driver.NVML), ctypes.RTLD_LOCAL).gpuherd_standin_layout(told)
    assert told[0] == LAYOUT_VERSION
    assert list(empty_cache.iterdir()) == [folder]


def test_no_compiler_at_all_names_the_remedy(empty_cache: Path, tmp_path: Path) -> None:
    """In a Python that has neither: -S hides the wheels, PATH the system's compilers."""
    code = "from gpuherd.standin import driver\ndriver.library_folder()"
    source = Path(driver.__file__).parents[2]
    environment = {"PATH": "", "PYTHONPATH": str(source), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    result = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, env=environment)
    assert "GpuherdError: simulated GPUs need a C compiler" in result.stderr
    assert "pip install 'gpuherd[simulate]'" in result.stderr


def test_a_compiler_that_fails_is_quoted(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "bin" / "cc"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho 'no room on device' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken.parent}:/bin")
    with pytest.raises(GpuherdError, match="no room on device"):
        driver.library_folder()
    assert list(empty_cache.iterdir()) == []


def test_a_cache_that_can_not_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(CannotWrite, match="XDG_CACHE_HOME"):
        driver.library_folder()


def test_a_user_without_a_home_is_told_what_to_set(tmp_path: Path) -> None:
    code = "import os\nfrom gpuherd.standin import driver\nos.setuid(54321)\ndriver.library_folder()"
    if os.getuid() != 0:
        pytest.skip("only root can become a user without a home")
    environment = {"PYTHONPATH": str(Path(driver.__file__).parents[2])}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "CannotWrite: no home folder" in result.stderr


def test_the_cuda_library_has_no_device() -> None:
    library = ctypes.CDLL(str(driver.library_folder() / driver.CUDA), ctypes.RTLD_LOCAL)
    assert library.cuInit(0) == 100
    count = ctypes.c_int(-1)
    assert library.cuDeviceGetCount(ctypes.byref(count)) == 100
    assert count.value == 0
    # CUDA's runtime asks for everything by name; what it gets must be callable and have no device either.
    entry = ctypes.c_void_p()
    assert library.cuGetProcAddress_v2(b"cuDeviceGet", ctypes.byref(entry), 12000, ctypes.c_uint64(0), None) == 0
    assert ctypes.CFUNCTYPE(ctypes.c_int)(entry.value or 0)() == 100


def test_a_child_finds_both_libraries_by_name() -> None:
    code = "import ctypes; ctypes.CDLL('libnvidia-ml.so'); print(ctypes.CDLL('libcuda.so.1').cuInit(0))"
    environment = {"LD_LIBRARY_PATH": str(driver.library_folder())}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert result.stdout.strip() == "100"


def test_torch_stays_on_the_cpu() -> None:
    """True of any torch; with a CUDA build and a real GPU it shows that the stand-in hides them."""
    code = "import torch; print(torch.cuda.is_available())"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(driver.library_folder()), "CUDA_VISIBLE_DEVICES": "0"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert result.stdout.strip() == "False"


def test_the_sources_are_installed_with_the_package() -> None:
    assert shutil.which("cc") or driver.compiler()
    assert {"nvml.c", "amdsmi.c", "cuda.c", "state.h"} <= {path.name for path in Path(driver.__file__).parent.iterdir()}
