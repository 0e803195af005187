"""A worker for the test of the crew; it imports nothing heavy, because it is started again and again."""

from __future__ import annotations

import os
import threading
import time
from typing import Any


def strange_worker(connection: Any) -> None:
    """Answers, unless the number says otherwise."""
    for number in iter(connection.recv, None):
        if number == 1:
            time.sleep(3600)
        if number == 2:
            os._exit(3)
        if number == 3:  # gone for whoever listens, and yet it never ends
            threading.Thread(target=time.sleep, args=(3600,)).start()
            connection.close()
            return
        connection.send({"number": number, "kind": "equal"})
    threading.Thread(target=time.sleep, args=(3600,)).start()  # an end that does not come
