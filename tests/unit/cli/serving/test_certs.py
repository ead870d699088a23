"""tdserve/cli/serving/certs.py: what the command prints, and the files that it names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tdserve.cli.main import main

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl command")


def test_certs_when_asked_for_json_then_the_files_and_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certs", str(tmp_path / "made"), "--host", "gpu1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"localhost", "gpu1"} <= set(found["hosts"])
    for stem in ("ca", "server", "client"):
        assert found[stem] == {
            end: str(tmp_path / f"made/{stem}.{name}") for end, name in (("cert", "pem"), ("key", "key"))
        }
        assert all(Path(file).is_file() for file in found[stem].values())


@pytest.mark.parametrize("host", ["", "gpu1:7707", "a,b", "a b", "http://gpu1"])
def test_certs_when_a_host_is_none_then_refused_and_nothing_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], host: str
) -> None:
    assert main(["certs", str(tmp_path / "made"), "--host", host]) == 1
    assert repr(host) in capsys.readouterr().err
    assert not (tmp_path / "made").exists()
