"""Send the very same message 16 times at once, to both receivers in turn."""

import sys
from concurrent.futures import ThreadPoolExecutor

from app import inbox

from oncehook import samples
from oncehook.testing import signed

addresses = sys.argv[1:] or ["http://127.0.0.1:4021", "http://127.0.0.1:4022"]
message = signed(inbox.sources["whatsapp"], "message.text")

with ThreadPoolExecutor(16) as threads:
    targets = [f"{addresses[n % len(addresses)]}/in/whatsapp" for n in range(16)]
    for answer in threads.map(lambda target: samples.post(target, message), targets):
        print(answer.status, answer.json()["status"])
