from pathlib import Path

import pytest

from ratchet.errors import ConfigError
from stack.box_host import box_host
from stack.cluster import Cluster
from stack.parts import Stack


def test_other_boxes_of_the_environment_are_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_KEY", "e2b_of_the_cloud")
    cluster = Cluster.model_validate({"head": "10.0.0.1", "hosts": {"10.0.0.2": {"boxes": True}}})
    with (
        pytest.raises(ConfigError, match=r"host 10.0.0.2 has `boxes: true`, but E2B_API_KEY"),
        box_host(cluster, Stack(tmp_path), tmp_path, print),
    ):
        pass
