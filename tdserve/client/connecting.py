"""Connections to one server or several."""

from __future__ import annotations

from typing import Any, cast

from tdserve.base.config import ClientConfig, TransportName
from tdserve.base.tls import TLS
from tdserve.client.client import Client
from tdserve.client.cluster.cluster_client import connect_cluster
from tdserve.client.cluster.servers.cluster_servers import ClusterRecipe
from tdserve.client.cluster.servers.membership import is_of_cluster
from tdserve.client.session.recipe import Recipe


def connect(
    address: str | None = None,
    *,
    transport: TransportName = "auto",
    token: str | None = None,
    timeout_s: float = 30.0,
    allow_pickle: bool = False,
    root: str | None = None,
    device: Any = None,
    numpy: bool = False,
    tls: TLS | None = None,
) -> Client:
    """Connects to a server, or to several that are one; see ``Client`` for the arguments.

    ``"a:7707,b:7707,c:7707"`` lists several, in the same order for all clients; ``"dns://tdserve.default.svc:7707"``
    finds the pods of a StatefulSet behind its headless service, and ``"ray://NAME"`` the servers that
    ``tdserve.ray.start`` runs. The result is then a :class:`~tdserve.ClusterClient`, which has the same calls.

    Without an address it takes the server that the environment names: ``TDSERVE_ADDRESS``, and ``TDSERVE_TOKEN`` or
    ``TDSERVE_TOKEN_FILE``, ``TDSERVE_TRANSPORT``, ``TDSERVE_LOCAL_ROOT`` and ``TDSERVE_TLS_CA`` (with ``_CERT`` and
    ``_KEY``) for arguments that are not given. With an address no variable counts, so that a token is not sent to
    another server.

    Raises:
        InvalidRequestError: No address is given, and ``TDSERVE_ADDRESS`` is not set; or a variable has an invalid
            value.
        ConnectError: The server did not answer within ``timeout_s``.
        UnauthenticatedError, ProtocolVersionError, NotSupportedError: The server or this version refuses the
            connection.
    """
    if address is None:
        found = ClientConfig.of_program()
        address, transport = found.address, found.transport if transport == "auto" else transport
        tls = found.find_tls() if tls is None else tls
        token, root = found.find_token() if token is None else token, found.local_root if root is None else root
    recipe = Recipe(Client, address, transport, token, timeout_s, allow_pickle, root, device, numpy, tls)
    if is_of_cluster(address):
        return cast(Client, connect_cluster(ClusterRecipe(recipe)))
    client: Client = recipe.make()
    try:
        client.call(lambda *_: None, client.make_deadline(None))  # again, if the server is restarting
    except BaseException:
        client.close()
        raise
    return client
