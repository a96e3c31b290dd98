"""A small HTTP service over prebaked kernels: alive when it runs, ready when every packed kernel is on the GPU.

    GET  /live     200 while the process answers
    GET  /ready    200 when all packed kernels are loaded, else 503 and why
    GET  /stats    tcache's counters
    POST /axpy     {"a": 2.0, "x": [...], "y": [...]} -> {"z": [...]}, computed by kernels/vector_add.py

Needs starlette and uvicorn (``examples/requirements.txt``). Settings come from the environment: ``TCACHE_BUNDLES``,
``TCACHE_MODE``, ``HOST`` (127.0.0.1) and ``PORT`` (8000).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

import tcache

log = logging.getLogger("serve")


class Readiness:
    """Loads every packed kernel in a thread of its own, so that liveness answers meanwhile."""

    def __init__(self) -> None:
        self.reason = "not ready: loading kernels"
        self.report: dict[str, object] = {}

    def start(self) -> None:
        threading.Thread(target=self._load, name="preload", daemon=True).start()

    def _load(self) -> None:
        try:
            import kernels.matmul
            import kernels.vector_add  # noqa: F401 - what the bundle was packed from

            tcache.activate()
            import torch

            if not torch.cuda.is_available():
                self.reason = "not ready: no GPU"
                log.error(self.reason)
                return
            done = tcache.preload()
        except Exception as error:
            self.reason = f"not ready: {error}"
            log.exception("preload")
            return
        self.report = {"target": done.target, "loaded": len(done.loaded), "seconds": round(done.seconds, 3)}
        if done.failed:
            first = done.failed[0]
            self.reason = f"not ready: {len(done.failed)} kernels are missing: {first.kernel}: {first.reason}"
        else:
            self.reason = ""
        log.info("preload: %s %s", self.report, self.reason or "ready")


readiness = Readiness()


async def live(_request):
    return JSONResponse({"alive": True})


async def ready(_request):
    if readiness.reason:
        return JSONResponse({"ready": False, "reason": readiness.reason}, status_code=503)
    return JSONResponse({"ready": True, **readiness.report})


async def stats(_request):
    return JSONResponse(tcache.stats())


async def axpy(request):
    if readiness.reason:
        return JSONResponse({"error": readiness.reason}, status_code=503)
    from starlette.concurrency import run_in_threadpool

    try:
        return JSONResponse(await run_in_threadpool(compute, await request.json()))
    except tcache.CacheMiss as miss:  # a shape that was not prebaked: the answer names it, nothing compiles
        return JSONResponse({"error": str(miss), "reasons": miss.reasons}, status_code=501)
    except (KeyError, TypeError, ValueError) as error:
        return JSONResponse({"error": f"expected a, x and y: {error}"}, status_code=400)


def compute(body):
    import torch

    from kernels.vector_add import axpy

    x, y = (torch.tensor(body[name], dtype=torch.float32, device="cuda") for name in ("x", "y"))
    return {"z": axpy(float(body["a"]), x, y).tolist()}


@contextlib.asynccontextmanager
async def lifespan(_app):
    readiness.start()
    yield


app = Starlette(
    lifespan=lifespan,
    routes=[
        Route("/live", live),
        Route("/ready", ready),
        Route("/stats", stats),
        Route("/axpy", axpy, methods=["POST"]),
    ],
)

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    uvicorn.run(app, host=os.environ.get("HOST", "127.0.0.1"), port=int(os.environ.get("PORT", "8000")))
