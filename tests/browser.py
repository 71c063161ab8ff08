"""Control Chromium without a window over its DevTools protocol.

Tests open pages, press Tab and run axe-core.
"""

import json
import os
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
AXE = Path(
    os.environ.get("AXE_CORE", Path(__file__).parents[1] / "node_modules/axe-core/axe.min.js")
)
MISSING = (not CHROMIUM and "needs Chromium or Chrome") or (
    not AXE.exists()
    and "needs axe-core: run `npm install --no-save axe-core`, or name its axe.min.js in AXE_CORE"
)


class Browser:
    "One tab of a browser with its profile in `folder`."

    def __init__(self, folder):
        import websocket  # comes with JupyterLab

        options = (
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-port=0",
            f"--user-data-dir={folder}",
        )
        self.process = subprocess.Popen(
            [CHROMIUM, *options, "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        port = Path(folder) / "DevToolsActivePort"
        limit = time.monotonic() + 30
        while not (port.exists() and port.read_text().count("\n")):
            assert time.monotonic() < limit, "the browser does not start"
            assert self.process.poll() is None, "the browser does not start"
            time.sleep(0.1)
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port.read_text().split()[0]}/json"
        ) as listed:
            tab = next(tab for tab in json.load(listed) if tab["type"] == "page")
        self.socket = websocket.create_connection(
            tab["webSocketDebuggerUrl"], suppress_origin=True, timeout=120
        )
        self.count = 0

    def call(self, method, **arguments):
        "Return the result of a method of the protocol."
        self.count += 1
        self.socket.send(json.dumps({"id": self.count, "method": method, "params": arguments}))
        while (answer := json.loads(self.socket.recv())).get("id") != self.count:
            pass
        return answer["result"]

    def run(self, script):
        "Return the value of a JavaScript expression as soon as it exists."
        result = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def visit(self, address, width, theme="light"):
        "Go to an address, without waiting for the page."
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": theme}],
        )
        self.call("Page.navigate", url=address)

    def wait(self, script, seconds=60):
        "Return the value of a JavaScript expression as soon as it is true."
        limit = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < limit, f"not true within {seconds} seconds: {script}"
            time.sleep(0.2)
        return value

    def open(self, path, width, theme="light"):
        "Show a file without animations and wait for its formulas."
        self.visit(path.resolve().as_uri(), width, theme)
        limit = time.monotonic() + 60
        while self.run("[location.pathname, document.readyState]") != [
            path.resolve().as_uri()[7:],
            "complete",
        ]:
            assert time.monotonic() < limit, f"{path} does not load"
            time.sleep(0.05)
        still = (
            "* { animation: none !important; transition: none !important; "
            "scroll-behavior: auto !important }"
        )
        self.run(f"document.head.insertAdjacentHTML('beforeend', '<style>{still}</style>')")
        self.run("window.MathJax?.startup?.promise?.then(() => 1)")

    def press(self, key):
        text = {"Enter": "\r"}.get(key, "")
        self.call(
            "Input.dispatchKeyEvent",
            type="keyDown",
            key=key,
            code=key,
            text=text,
            windowsVirtualKeyCode={"Tab": 9, "Enter": 13, "Escape": 27}[key],
        )
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    def findings(self):
        "Return (rule, impact, element, message) of axe-core's findings, with all parts unfolded."
        self.run(
            "document.querySelectorAll('details').forEach(d => { d.open = true }); "
            "new Promise(done => setTimeout(done, 200))"
        )
        self.run(AXE.read_text(encoding="utf-8") + ";0")
        return self.run(
            "axe.run(document, {resultTypes: ['violations']})"
            ".then(result => result.violations.flatMap(v => v.nodes.map("
            "n => [v.id, v.impact, n.target.join(' '), "
            "[...n.any, ...n.all, ...n.none].map(c => c.message).join('; ')])))"
        )

    def close(self):
        self.socket.close()
        self.process.terminate()
        self.process.wait(30)
