"""Owns the workloads of an experiment that have a name: what each guest runs first. Pure."""

_DOCKER = """\
set -e
tar -C / -c usr/bin/busybox | docker import - density > /dev/null
docker run -d --name density -p 8080:80 density \
    /usr/bin/busybox httpd -f -p 80 -h /usr/bin > /dev/null
curl -sSf --noproxy '*' -o /dev/null --retry 20 --retry-connrefused http://127.0.0.1:8080/busybox
"""
"""The daemon, a container of one static file (nothing is fetched from anywhere), a published port
and an answer through it."""

NAMED = {"docker": _DOCKER}


def spelled_out(workload: str) -> str:
    """The command that a guest runs for it: a named one, or `workload` itself."""
    return NAMED.get(workload, workload)
