"""A client that is killed: sends its requests, says so, and reads until it is no more.

    python doomed.py PORT < BODIES    # one JSON body a line
"""

import socket
import sys
import time


def main() -> None:
    connections = []
    for line in sys.stdin.buffer:
        body = line.strip()
        connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
        lines = ("POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json")
        head = "\r\n".join((*lines, f"Content-Length: {len(body)}", "", ""))
        connection.sendall(head.encode() + body)
        connections.append(connection)
    print("sent", flush=True)
    while True:
        for connection in connections:
            connection.settimeout(0.01)
            try:
                connection.recv(4096)
            except TimeoutError:
                continue
        time.sleep(0.01)


if __name__ == "__main__":
    main()
