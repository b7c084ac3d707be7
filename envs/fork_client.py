"""The command that stands for a copy of a program (envs/forked.py).

It runs once for each copy, so it imports little: what envs/forked.py imports takes 25 ms.
"""

import array
import json
import os
import socket
import sys


def join(place: str, arguments: list[str]) -> int:
    """Have the program run with the streams of this process, and return its exit code."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(place)
        asked = {"arguments": arguments, "folder": os.getcwd(), "env": dict(os.environ)}
        text = json.dumps(asked).encode()
        streams = array.array("i", [0, 1, 2])
        size = len(text).to_bytes(8, "big")
        connection.sendmsg([size], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams.tobytes())])
        connection.sendall(text)
        for stream in (0, 1, 2):
            os.close(stream)  # the copy has them, and closing them there has to be seen
        code = connection.recv(1)
    return code[0] if code else 1


if __name__ == "__main__":
    sys.exit(join(sys.argv[1], sys.argv[2:]))
