"""Owns the credential gateway: what a guest asks of a model provider goes there with the key that
only the host has, and what it took is counted.

The one owner of httpx. Knows no SSH, no sandbox and no file: requests come as exchanges of an HTTP
server, what happened is told to whoever listens.
"""

from vmsandbox.gateway.forwarding import Exchange, GatewayServer
from vmsandbox.gateway.keys import Key, keys_of
from vmsandbox.gateway.ledger import Ledger

__all__ = ["Exchange", "GatewayServer", "Key", "Ledger", "keys_of"]
