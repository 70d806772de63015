"""Owns the credential gateway: what a guest asks of a model provider goes there with the key that
only the host has, and what it took is counted.

The one owner of httpx. Knows no SSH, no sandbox and no file: requests come as exchanges of an HTTP
server, what happened is told to whoever listens. Its parts are imported by name: `keys` and
`ledger` are light, `forwarding` reads httpx.
"""
