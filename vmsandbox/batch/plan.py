"""Owns how task files become the tasks of a batch: reads them and what they name, and refuses all
of it with every problem at once.

Starts nothing and writes nothing.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, NamedTuple

from vmsandbox.batch import taskfile
from vmsandbox.batch.taskfile import Grants, Planned, Read, TaskEntry, entries_of, problem_of
from vmsandbox.document import MOST_BYTES, Document, Problem, Unreadable, parse
from vmsandbox.errors import UsageProblem, VmsandboxError
from vmsandbox.sandbox import agents_at, read_brief

ID = "{id}"
_SHOWN = 100


class Plan(NamedTuple):
    """The tasks in the order of the files, and those that were there already."""

    tasks: tuple[Planned, ...]
    twice: tuple[Planned, ...] = ()


def plan_files(files: Sequence[Path]) -> Plan:
    """The tasks of these files. Raises UsageProblem ``tasks_invalid`` with every problem."""
    return _planned(_documents(files))


def granted(plan: Plan, grants: Grants | None) -> Plan:
    """The same tasks, with what their user lets them do."""
    if grants is None:
        return plan
    tasks = tuple(task.model_copy(update={"grants": grants}) for task in plan.tasks)
    return plan._replace(tasks=tasks)


def plan_ids(template: Path, ids: Sequence[str]) -> Plan:
    """The tasks of a template, once for each id: ``{id}`` in its texts is that id.

    Raises UsageProblem ``tasks_invalid`` with every problem.
    """
    (found,) = _documents([template])
    if isinstance(found, Problem):
        return _planned([found])
    wanted = list(dict.fromkeys(ids))
    return _planned([found.replaced(partial(_with_id, id_)) for id_ in wanted])


def _with_id(id_: str, value: Any) -> Any:
    if isinstance(value, str):
        return value.replace(ID, id_)
    if isinstance(value, list):
        return [_with_id(id_, one) for one in value]
    if isinstance(value, dict):
        return {_with_id(id_, key): _with_id(id_, one) for key, one in value.items()}
    return value


def _documents(files: Sequence[Path]) -> list[Document | Problem]:
    found: list[Document | Problem] = []
    for path in files:
        try:
            with path.open("rb") as file:  # never more than what is too much
                found.append(parse(str(path), file.read(MOST_BYTES + 1)))
        except OSError as error:
            found.append(Problem(str(path), 0, f"cannot be read: {error.strerror}"))
        except Unreadable as unreadable:
            found.append(unreadable.problem)
    return found


def _planned(documents: Sequence[Document | Problem]) -> Plan:
    reads = [taskfile.understand(one) for one in documents if isinstance(one, Document)]
    problems = [one for one in documents if isinstance(one, Problem)]
    planned: list[Planned] = []
    for read in reads:
        problems += [*read.problems, *taskfile.problems_of(read, partial(_agents_there, read))]
        problems += [*_worktree_problems(read), *_graph_problems(read)]
        for number, task in read.tasks:
            told, wrong = _looked_up(read, number, task)
            problems += wrong
            if not any(problems):
                planned += _expanded(read, number, told)
    tasks, twice, clashes = _without_doubles(planned)
    refuse([*problems, *clashes])
    return Plan(tasks, twice)


def refuse(problems: Iterable[Problem]) -> None:
    """UsageProblem ``tasks_invalid`` if there are any; each is told once."""
    told = list(dict.fromkeys(map(str, sorted(problems))))
    if not told:
        return
    more = [f"… and {len(told) - _SHOWN} more"] if len(told) > _SHOWN else []
    lines = [f"{len(told)} problem(s), nothing was started:", *told[:_SHOWN], *more]
    raise UsageProblem(
        "tasks_invalid", "\n  ".join(lines), hint="vmsandbox batch --schema    (JSON Schema)"
    )


# --- what only a look at the host tells -----------------------------------------------------------


def _folder(read: Read) -> Path:
    return Path(read.document.file).absolute().parent


def _looked_up(read: Read, number: int, task: TaskEntry) -> tuple[TaskEntry, list[Problem]]:
    """The task with its brief read, and what is wrong with the paths that it names."""
    if not task.brief_file or task.brief:
        return task, []
    try:
        brief = read_brief(_folder(read) / task.brief_file)
    except UsageProblem as error:
        return task, [problem_of(read.document, number, "brief_file", error.message)]
    return task.model_copy(update={"brief": brief}), []


def _agents_there(read: Read, task: TaskEntry) -> Collection[str]:
    """The agents that the settings of a task's worktree name; wrong settings are told later."""
    try:
        return agents_at(_folder(read) / (task.worktree or "."))
    except VmsandboxError:
        return ()


def _worktree_problems(read: Read) -> Iterator[Problem]:
    """Also of tasks that have other problems."""
    value = read.document.value
    defaults = value.get("defaults") if isinstance(value, dict) else None
    inherited = defaults.get("worktree") if isinstance(defaults, dict) else None
    for number, entry in entries_of(read.document):
        named = entry.get("worktree", inherited)
        if named is None:
            yield problem_of(read.document, number, "worktree", "is missing")
        elif isinstance(named, str) and not (_folder(read) / named).is_dir():
            yield problem_of(read.document, number, "worktree", f"there is no folder {named}")


def _expanded(read: Read, number: int, task: TaskEntry) -> Iterator[Planned]:
    where = f"{read.document.file}:{read.document.line(('tasks', number))}"
    return taskfile.expanded(task, read.agents, _folder(read), where)


# --- names ----------------------------------------------------------------------------------------


def _graph_problems(read: Read) -> Iterator[Problem]:
    """Also among tasks that have other problems: what they say they come after counts."""
    graph: dict[str, list[str]] = {}
    numbers: dict[str, int] = {}
    for number, entry in entries_of(read.document):
        if isinstance(name := entry.get("name"), str):
            after = entry.get("after")
            words = after if isinstance(after, list) else []
            graph.setdefault(name, []).extend(one for one in words if isinstance(one, str))
            numbers.setdefault(name, number)
    for name, after in graph.items():
        for other in after:
            if other not in graph:
                yield _after(read, numbers[name], f"no task is named {other!r}")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle = list(reversed(error.args[1]))
        yield _after(read, numbers[circle[0]], f"a cycle: {' after '.join(circle)}")


def _after(read: Read, number: int, text: str) -> Problem:
    return problem_of(read.document, number, "after", text)


def _without_doubles(
    planned: Sequence[Planned],
) -> tuple[tuple[Planned, ...], tuple[Planned, ...], list[Problem]]:
    """Each task once; another task of the same name is a problem."""
    kept: dict[str, Planned] = {}
    twice: list[Planned] = []
    problems: list[Problem] = []
    for task in planned:
        first = kept.setdefault(task.name, task)
        if first is task:
            continue
        file, _, line = task.where.rpartition(":")
        if first.model_copy(update={"where": ""}) == task.model_copy(update={"where": ""}):
            twice.append(task)
        else:
            text = f"a sandbox of the task at {first.where} is named {task.name!r}, too"
            problems.append(Problem(file, int(line), text))
    return tuple(kept.values()), tuple(twice), problems
