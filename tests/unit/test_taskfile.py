"""Task files: what they may say, and that all that is wrong with them is told at once, by line."""

import json
from pathlib import Path

import pytest

from vmsandbox.batch import Grants, Plan, granted, plan_files, plan_ids, schema
from vmsandbox.batch.making import request
from vmsandbox.errors import UsageProblem
from vmsandbox.model import Budget, Check, HttpCheck


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "w").mkdir()
    return tmp_path


def planned(folder: Path, text: str, name: str = "t.yaml") -> Plan:
    (folder / name).write_text(text)
    return plan_files([folder / name])


def refused(folder: Path, text: str, name: str = "t.yaml") -> list[str]:
    """The problems, without the folder."""
    with pytest.raises(UsageProblem) as caught:
        planned(folder, text, name)
    assert (caught.value.code, caught.value.exit_code) == ("tasks_invalid", 2)
    return [line.strip().removeprefix(f"{folder}/") for line in caught.value.message.split("\n")]


WHOLE = """\
defaults:
  worktree: w
  memory: 2G
  timeout: 5m
  env: {CI: "true", PORT: 3000}
  verify: [make test]
agents:
  claude: [claude, -p]
  other: other --brief "$VMSANDBOX_BRIEF"
tasks:
  - name: fix
    agents: [claude, other]
    repeat: 2
    brief: {goal: It works., sources: a.py}
    env: {PORT: 4000}
    after: [first]
  - name: first
    command: [make, all]
    memory: 512
    brief_file: b.md
    verify:
      - http: {port: 80, contains: [ok]}
        timeout: 10s
"""


def test_defaults_agents_and_repetitions(folder: Path) -> None:
    (folder / "b.md").write_text("# Goal\nIt is first.\n")
    tasks = planned(folder, WHOLE).tasks
    assert [task.name for task in tasks] == [
        *("fix-claude-1", "fix-claude-2", "fix-other-1", "fix-other-2", "first")
    ]
    fix, first = tasks[2], tasks[4]
    assert fix.command == ("/bin/sh", "-c", 'other --brief "$VMSANDBOX_BRIEF"')
    assert (fix.origin, fix.after) == ("fix", ("first",))
    assert fix.env == {"CI": "true", "PORT": "4000"}
    assert (fix.memory_mib, fix.timeout_s, fix.worktree) == (2048, 300, folder / "w")
    assert fix.verify == (Check(command=("/bin/sh", "-c", "make test")),)
    assert fix.brief
    assert fix.brief.sources == ("a.py",)
    assert (first.memory_mib, first.command) == (512, ("make", "all"))
    assert first.brief
    assert first.brief.goal == "It is first."
    assert first.verify == (Check(http=HttpCheck(port=80, contains=("ok",)), timeout_s=10),)


def test_toml_says_the_same(folder: Path) -> None:
    text = """
[defaults]
worktree = "w"
[agents]
claude = ["claude", "-p"]
[[tasks]]
name = "a"
agent = "claude"
[tasks.brief]
goal = "g"
[[tasks]]
name = "b"
command = "true"
after = ["a"]
"""
    first, second = planned(folder, text, "t.toml").tasks
    assert (first.command, second.after) == (("claude", "-p"), ("a",))


WRONG = """\
defaults: {colour: red}
tasks:
  - {name: a, command: "true", after: [b], worktree: w}
  - {name: b, command: "true", after: [a], worktree: w, cpu: 3}
  - {name: b, command: [], worktree: w}
  - name: c
    worktree: nowhere
    agent: x
    env: {A: yes, B: true, 1A: x}
  - {name: d, worktree: w, after: [z], memory: lots}
  - {name: e/f, worktree: w, command: x, agent: y}
  - {name: g, worktree: w, agent: y}
  - {name: h, command: x, brief: {goal: ""}, verify: [{timeout: 3}]}
"""


def test_all_problems_at_once_with_their_lines(folder: Path) -> None:
    found = refused(folder, WRONG)
    wanted = {
        1: "defaults.colour: unknown key",
        3: "tasks.0.after: a cycle: ",
        4: "tasks.1.cpu: unknown key",
        5: "tasks.2.name: 'b' is the name of line 4, too",
        7: "tasks.3.worktree: there is no folder nowhere",
        9: "tasks.3.env: '1A' is no name",
        10: "tasks.4.after: no task is named 'z'",
        11: "tasks.5.name: String should match",
        12: "tasks.6.agent: unknown agent 'y'",
        13: "tasks.7.worktree: is missing",
    }
    for line, text in wanted.items():
        assert [one for one in found if one.startswith(f"t.yaml:{line}: {text}")], (line, text)
    assert any("t.yaml:5: tasks.2.command: a command is a list of words" in one for one in found)
    assert any("t.yaml:10: tasks.4.memory: not a size" in one for one in found)
    assert any("t.yaml:13: tasks.7.brief: the goal is empty" in one for one in found)
    assert found[0].startswith(f"{len(found) - 1} problem(s), nothing was started")


def test_a_second_file_is_looked_at_even_if_the_first_is_broken(folder: Path) -> None:
    (folder / "a.yaml").write_text("tasks: [")
    (folder / "b.yaml").write_text("tasks: []\nextra: 1\n")
    big = folder / "c.yaml"
    big.write_text("a: &a [x]\n" + "b: [*a, *a]\n" * 900_000)
    with pytest.raises(UsageProblem) as caught:
        plan_files([folder / "a.yaml", folder / "b.yaml", big, folder / "gone.yaml"])
    message = caught.value.message
    for text in (
        "a.yaml:1: not YAML",
        "b.yaml:1: tasks: there must be",
        "b.yaml:2: extra: unknown key",
        "c.yaml: larger than",
        "gone.yaml: cannot be read",
    ):
        assert text in message
    assert message.startswith("5 problem(s)")


def test_the_same_task_of_two_files_is_one_and_another_of_its_name_is_a_problem(
    folder: Path,
) -> None:
    task = "tasks: [{name: a, command: x, worktree: w}]"
    (folder / "a.yaml").write_text(task)
    (folder / "b.yaml").write_text(task)
    plan = plan_files([folder / "a.yaml", folder / "b.yaml"])
    assert ([t.name for t in plan.tasks], [t.name for t in plan.twice]) == (["a"], ["a"])
    (folder / "b.yaml").write_text(task.replace("x", "y"))
    with pytest.raises(UsageProblem) as caught:
        plan_files([folder / "a.yaml", folder / "b.yaml"])
    assert "b.yaml:1: a sandbox of the task at" in caught.value.message


def test_copies_and_other_tasks_may_not_share_a_name(folder: Path) -> None:
    text = """\
defaults: {worktree: w, command: x}
tasks:
  - {name: a, repeat: 2}
  - {name: a-2}
"""
    assert any("named 'a-2', too" in one for one in refused(folder, text))


def test_a_template_makes_a_task_of_each_id(folder: Path) -> None:
    template = folder / "t.yaml"
    template.write_text("""\
tasks:
  - name: fix-{id}
    worktree: w
    command: [fix, "{id}"]
    brief: Fix number {id}.
""")
    tasks = plan_ids(template, ["7", "9", "7"]).tasks
    assert [(task.name, task.command[1]) for task in tasks] == [("fix-7", "7"), ("fix-9", "9")]
    assert tasks[1].brief
    assert tasks[1].brief.goal == "Fix number 9."
    with pytest.raises(UsageProblem) as caught:
        plan_ids(template, ["7", "../x"])
    assert "t.yaml:2: tasks.0.name" in caught.value.message


def test_a_file_narrows_what_its_user_lets_every_task_do(folder: Path) -> None:
    plan = planned(
        folder,
        """\
defaults: {worktree: w, command: x, max_tokens: 500, allow: [pypi.org]}
tasks:
  - {name: a, net: none, max_cost: 1.5}
  - {name: b}
""",
    )
    grants = Grants(
        net={"mode": "public"}, gateways=("openai",), budget=Budget(max_tokens=900), ask=True
    )
    first, second = (request(task, None, None) for task in granted(plan, grants).tasks)
    for asked in (first, second):
        assert (asked.net, asked.gateways, asked.ask) == ({"mode": "public"}, ("openai",), True)
        assert asked.budget.max_tokens == 900
    assert first.within_net == {"mode": "none", "allow": ("pypi.org",)}
    assert first.within_budget == Budget(max_tokens=500, max_cost=1.5)
    assert second.within_net == {"allow": ("pypi.org",)}
    (plain, _) = (request(task, None, None) for task in granted(plan, None).tasks)
    assert (plain.net, plain.gateways, plain.ask) == ({}, (), False)
    text = "tasks: [{name: a, worktree: w, command: x, net: all, allow: [1.2.3.4], max_cost: 0}]"
    told = refused(folder, text)
    assert [
        key in line
        for key, line in zip(("allow", "max_cost", "net"), sorted(told[1:]), strict=True)
    ] == [True] * 3


def test_the_schema_names_every_key() -> None:
    text = json.dumps(schema())
    for key in ("tasks", "defaults", "agents", "after", "repeat", "verify", "brief_file", "goal"):
        assert f'"{key}"' in text
