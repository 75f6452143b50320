"""Serves moto's S3 on 127.0.0.1, with the bucket that is named, until its input ends. Prints its port."""

from __future__ import annotations

import logging
import sys
import urllib.request

from moto.server import ThreadedMotoServer


def main() -> None:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    signed = {"Authorization": "AWS4-HMAC-SHA256 Credential=access/20260101/us-east-1/s3/aws4_request"}
    made = urllib.request.Request(f"http://127.0.0.1:{port}/{sys.argv[1]}", method="PUT", headers=signed)
    urllib.request.urlopen(made).close()
    print(port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
