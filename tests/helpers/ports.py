"""Ports and servers for tests that run beside others."""

import contextlib
import itertools
import os
import socket
import threading

# Below those that the system hands out to whoever asks for any: none of them is taken between here and its use.
FIRST, NUM_PROCESSES, NUM_OF_A_PROCESS = 20_000, 200, 50
_numbers = itertools.count()


def free_port():
    """One on which nobody listens, and which no other process of the same tests is given."""
    first = FIRST + os.getpid() % NUM_PROCESSES * NUM_OF_A_PROCESS
    for _ in range(NUM_OF_A_PROCESS):
        port = first + next(_numbers) % NUM_OF_A_PROCESS
        with socket.socket() as one:
            # As servers do: a port of which a connection has just ended is free.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise OSError(f"ports {first} to {first + NUM_OF_A_PROCESS - 1} are all in use")


@contextlib.contextmanager
def running(server):
    """A socketserver that serves in a thread of its own until it is left."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
