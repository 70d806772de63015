"""Docker in a clone, without any registry: the daemon comes with its first use, images are built
and run, Compose brings services up in order, and what is collected is the project and no more.

Containers cost an emulated guest seconds each, so one task does it all and the tests read what it
said.
"""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.repositories import Repository
from tests.sandboxes import Answer, State
from tests.vm.lives import kinds_of, status_of

NAME = "stack"

DOCKERFILE = """\
FROM scratch
ADD tool.tar /
COPY README /www/
CMD ["sleep", "1"]
"""

# A check costs an emulated guest seconds, so they are few.
COMPOSE = """\
services:
  records:
    image: built
    command: [sh, -c, "echo kept in a volume > /data/index.html && exec httpd -f -p 80 -h /data"]
    volumes: ["records:/data"]
    healthcheck: &answers
      test: [CMD, wget, -q, -O, /dev/null, "http://127.0.0.1/"]
      interval: 10s
      timeout: 120s
      retries: 60
  backend:
    image: built
    command: [sh, -c, "mv /www/README /www/index.html && exec httpd -f -p 80 -h /www"]
    healthcheck: *answers
  web:
    image: built
    command: [sh, -c, "for n in records backend; do wget -q -O - http://$$n/; done >
      /out/index.html && exec httpd -f -p 80 -h /out"]
    depends_on: {records: {condition: service_healthy}, backend: {condition: service_healthy}}
    volumes: ["./out:/out"]
    ports: ["8080:80"]
    healthcheck: *answers
volumes:
  records: {}
"""

TASK = """\
say() { echo "== $1 $(cut -d ' ' -f 1 /proc/uptime)"; }
say idle; pgrep -l 'docker|containerd' || echo no daemon
mkdir -p /tmp/context /tmp/tool/usr/bin /tmp/tool/bin
cp /usr/bin/busybox /tmp/tool/usr/bin
busybox --install -s /tmp/tool/bin
tar -C /tmp/tool -cf /tmp/context/tool.tar .
cp README Dockerfile /tmp/context
say build; docker build -q -t built /tmp/context > /dev/null
docker image inspect -f '{{.Config.Cmd}} {{.GraphDriver.Name}}' built
say up; docker compose up --wait 2>&1 | tail -n 3
say state; docker compose ps --format '{{.Service}} {{.State}} {{.Health}}' | sort
say page; curl -s http://127.0.0.1:8080/
say listening; ss -Hltn | awk '{ sub(/.*:/, "", $4); print $4 }' | sort -un
say volume; docker volume ls -q
say end
"""


class Stack(NamedTuple):
    """What came of the task."""

    state: State
    answer: Answer

    def said(self, part: str) -> list[str]:
        """The lines after a heading."""
        found = re.search(rf"^== {part} .*\n((?:(?!== ).*\n)*)", self.answer.out, re.MULTILINE)
        assert found, f"no {part}: {self.answer.out}{self.answer.err}"
        return found[1].splitlines()


@pytest.fixture(scope="module")
def stack(shared_state: State, tmp_path_factory: pytest.TempPathFactory) -> Stack:
    files: dict[str, str | bytes] = {
        "README": "hello\n",
        "Dockerfile": DOCKERFILE,
        "compose.yaml": COMPOSE,
        "task": TASK,
    }
    project = Repository.create(tmp_path_factory.mktemp("docker") / "project", files).path
    answer = shared_state(
        "run", "--name", NAME, "--memory", "2G", "--", "sh", "-e", "task", cwd=project
    )
    return Stack(shared_state, answer)


def test_all_of_it_ends_well(stack: Stack) -> None:
    assert stack.answer.code == 0, stack.answer.out + stack.answer.err
    assert stack.said("end") == []


def test_an_idle_guest_has_no_daemon(stack: Stack) -> None:
    assert stack.said("idle") == ["no daemon"]


def test_images_are_built_from_nothing(stack: Stack) -> None:
    assert stack.said("build") == ["[sleep 1] overlay2"]


def test_compose_brings_up_services_by_their_health(stack: Stack) -> None:
    assert stack.said("state") == [f"{n} running healthy" for n in ("backend", "records", "web")]
    assert stack.said("page") == ["kept in a volume", "hello"]
    assert stack.said("volume") == ["project_records"]


def test_docker_opens_no_port_but_those_of_containers(stack: Stack) -> None:
    assert stack.said("listening") == ["22", "8080"]


def test_the_change_set_holds_the_projects_files_only(stack: Stack) -> None:
    assert kinds_of(stack.state, NAME) == {"out/index.html": "A"}


def test_it_was_a_clone_whose_disk_holds_the_images(stack: Stack) -> None:
    folder = stack.state.path / "sandboxes" / status_of(stack.state, NAME)["id"]
    assert not (folder / "seed.iso").exists(), "it was booted, not cloned"
    assert Path(folder / "overlay.qcow2").stat().st_blocks * 512 < 256 * 1024 * 1024
