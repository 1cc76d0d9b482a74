// The connection: a WebSocket, or polling where it does not open within three seconds. Reconnects with backoff.
const OPEN_MS = 3000;

class Link {
  // `hello` gives the first message; `onmessage(header, arrays)`, `onstate("open" | "closed")`.
  constructor(base, hello, onmessage, onstate) {
    Object.assign(this, { base, hello, onmessage, onstate });
    this.transport = "none";
    this.tries = 0;
    this.everOpen = false;
    this.closed = false;
    this.bytes = 0;
    const wish = new URLSearchParams(location.search).get("transport");
    if (wish === "poll") this.poll(); else this.connect();
  }

  connect() {
    if (this.closed) return;
    const url = new URL("ws", this.base);
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    const socket = new WebSocket(url);
    socket.binaryType = "arraybuffer";
    this.socket = socket;
    let opened = false;
    const late = setTimeout(() => { if (!opened) socket.close(); }, OPEN_MS);
    socket.onopen = () => {
      opened = this.everOpen = true;
      clearTimeout(late);
      this.transport = "websocket";
      socket.send(JSON.stringify(this.hello(2)));
    };
    socket.onmessage = (event) => this.took(event.data);
    socket.onclose = () => {
      clearTimeout(late);
      if (this.closed || this.socket !== socket) return;
      this.down();
      if (!this.everOpen) return void this.poll();
      this.again(() => this.connect());
    };
  }

  took(buffer) {
    this.bytes += buffer.byteLength;
    this.heard(buffer, 0);
  }

  heard(buffer, offset) {
    const { header, arrays } = decodeMessage(buffer, offset);
    if (header.t === "ping") return this.send({ t: "pong" });
    if (header.t === "welcome") { this.viewer = header.viewer; this.tries = 0; this.onstate("open"); }
    this.onmessage(header, arrays);
  }

  down() {
    this.viewer = null;
    this.onstate("closed");
  }

  again(action) {
    const wait = Math.min(300 * 2 ** this.tries++, 8000) * (0.7 + 0.6 * Math.random());
    this.retry = setTimeout(action, wait);
  }

  send(message) {
    if (this.transport === "websocket" && this.socket.readyState === 1) {
      this.socket.send(JSON.stringify(message));
    } else if (this.transport === "poll" && this.viewer) {
      if (message.t === "drawn") this.returned.push(message);
      else this.post({ say: [message], wait: 0 }).catch(() => {});
    }
  }

  async post(body) {
    const url = new URL("poll", this.base);
    if (this.viewer) url.searchParams.set("viewer", this.viewer);
    const answer = await fetch(url, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal: this.stop.signal });
    if (!answer.ok) throw new Error(answer.statusText);
    return answer.arrayBuffer();
  }

  async poll() {
    this.transport = "poll";
    this.stop = new AbortController();
    while (!this.closed) {
      this.returned = [];
      this.seq = 0;
      try {
        let say = [this.hello(1)];
        for (;;) {
          const buffer = await this.post({ say, seq: this.seq });
          this.bytes += buffer.byteLength;
          for (let at = 0; at < buffer.byteLength; ) {
            const size = new DataView(buffer).getUint32(at, true);
            this.pollHeard(buffer.slice(at + 4, at + 4 + size));
            at += 4 + size;
          }
          // the credit comes back with the next poll; a hidden tab draws nothing and must not spin
          while (document.hidden && !this.closed) await new Promise((go) => setTimeout(go, 3000, this.post({ say: [], wait: 0 }).catch(() => {})));
          await new Promise((go) => setTimeout(go, 16));
          say = this.returned.splice(0);
        }
      } catch (error) {
        if (this.closed) return;
        this.down();
        await new Promise((go) => this.again(go));
      }
    }
  }

  pollHeard(buffer) {
    const { header } = decodeMessage(buffer);
    if (header.t === "error" && header.code === "gone") throw new Error("gone");
    if (header.t === "frames") this.seq = header.seq;
    this.heard(buffer, 0);
  }

  close() {
    this.closed = true;
    clearTimeout(this.retry);
    if (this.stop) this.stop.abort();
    if (this.socket) this.socket.close();
  }
}
