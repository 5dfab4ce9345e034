// The connection to /debug/stream: opened while somebody looks, opened again when it breaks.

import { ask, Refusal } from "./api.js";
import { events } from "./sse.js";

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 8_000;
const SILENT_MS = 10_000; // samples come four times a second: a server that stopped, or a network that is gone, says nothing and closes nothing

/** Calls `onHello(constants)`, `onSample(sample)`, and `onTrouble(error)` when there is no stream: null where it is only not looked at. */
export class Watch {
  constructor({ onHello, onSample, onTrouble }) {
    this._calls = { onHello, onSample, onTrouble };
    this._controller = null;
    this._timer = 0;
    this._waitMs = FIRST_WAIT_MS;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.close() : this.open()));
  }

  /** Connect now, also where it would have waited. */
  open() {
    this.close();
    this._follow();
  }

  close() {
    clearTimeout(this._timer);
    this._controller?.abort();
    this._controller = null;
  }

  async _follow() {
    const controller = (this._controller = new AbortController());
    let isSilent = false;
    let silence = 0;
    const listen = () => {
      clearTimeout(silence);
      silence = setTimeout(() => {
        isSilent = true;
        controller.abort();
      }, SILENT_MS);
    };
    try {
      listen();
      const response = await ask("/debug/stream", { signal: controller.signal, asOperator: true });
      for await (const { event, data } of events(response.body)) {
        listen();
        this._waitMs = FIRST_WAIT_MS;
        const parsed = JSON.parse(data);
        if (event === "hello") this._calls.onHello(parsed);
        else this._calls.onSample(parsed);
      }
      throw new TypeError("the server ended the stream");
    } catch (error) {
      if (controller.signal.aborted && (!isSilent || this._controller !== controller)) return;
      this._controller = null;
      this._calls.onTrouble(error);
      if (error instanceof Refusal && error.wantsKey) return; // until somebody gives one
      const waitMs = Math.max(this._waitMs, error instanceof Refusal ? error.retryAfter * 1e3 : 0);
      this._waitMs = Math.min(this._waitMs * 2, LONGEST_WAIT_MS);
      this._timer = setTimeout(() => this.open(), waitMs);
    } finally {
      clearTimeout(silence);
    }
  }
}
