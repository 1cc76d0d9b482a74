// The whole run in one strip: height = how full the steps were, glyphs for joined, finished, preempted.
const JOIN = 1, FINISH = 2, PREEMPT = 4, FAILED = 8;

class Scrubber {
  constructor(stage) {
    this.stage = stage;
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.root = h("div", { class: "glass-scrubber", role: "slider", tabIndex: 0, "aria-label": WORDS.scrubber, "aria-valuemin": 0, "aria-valuemax": 0, "aria-valuenow": 0 }, this.canvas);
    this.bins = null;
    this.draw = onFrame(() => this.paint());
    const { signal } = stage;
    const on = (name, action) => this.root.addEventListener(name, action, { signal });
    on("pointerdown", (e) => { this.root.setPointerCapture(e.pointerId); this.held = true; this.to(e); });
    on("pointermove", (e) => { if (this.held) this.to(e); });
    on("pointerup", () => { this.held = false; });
    on("pointercancel", () => { this.held = false; });
    on("keydown", (e) => this.key(e));
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.root);
  }

  take(facts, load, flags) {
    this.bins = facts.bins ? { ...facts, load, flags } : null;
    this.draw();
  }

  show(at) {
    this.at = at;
    const set = (name, value) => { if (this.root.getAttribute(name) !== String(value)) this.root.setAttribute(name, value); };
    if (at.step !== null && at.step !== undefined) {
      set("aria-valuemin", at.first);
      set("aria-valuemax", at.last);
      set("aria-valuenow", at.step);
    }
    this.draw();
  }

  to(event) {
    if (!this.at || this.at.last === null || this.at.last === undefined) return;
    const box = this.root.getBoundingClientRect();
    const share = clamp((event.clientX - box.left) / box.width, 0, 1);
    const step = this.at.first + Math.min(Math.floor(share * (this.at.last - this.at.first + 1)), this.at.last - this.at.first);
    this.stage.seek(step);
  }

  key(event) {
    const page = Math.max(Math.round(((this.at && this.at.last - this.at.first) || 0) / 20), 1);
    const move = { ArrowLeft: event.shiftKey ? -page : -1, ArrowDown: -1, ArrowRight: event.shiftKey ? page : 1, ArrowUp: 1 }[event.key];
    if (!this.at || this.at.step === null) return;
    if (move) this.stage.seek(this.at.step + move);
    else if (event.key === "Home") this.stage.seek(this.at.first);
    else if (event.key === "End") this.stage.goLive();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  paint() {
    const { look } = this.stage;
    const [width, height] = [this.root.clientWidth, this.root.clientHeight];
    if (!width) return;
    const scale = Math.min(window.devicePixelRatio || 1, 2);
    if (this.canvas.width !== Math.round(width * scale)) { this.canvas.width = Math.round(width * scale); this.canvas.height = Math.round(height * scale); }
    const ctx = this.canvas.getContext("2d");
    ctx.setTransform(scale, 0, 0, scale, 0, 0);
    ctx.clearRect(0, 0, width, height);
    const floor = height - 1;
    ctx.fillStyle = look.color("grid");
    ctx.beginPath();
    ctx.roundRect(0, floor - 4, width, 4, 2);
    ctx.fill();
    if (!this.bins || !this.at) return;
    const { bins, load, flags, first, last } = this.bins;
    const wide = width / bins;
    const played = this.at.step ?? last;
    const span = last - first + 1;
    for (const past of [true, false]) {
      ctx.fillStyle = look.color(past ? "muted" : "border");
      ctx.beginPath();
      for (let i = 0; i < bins; i++) {
        if ((first + (i * span) / bins <= played) !== past) continue;
        const tall = Math.max((load[i] / 255) * (height - 12), load[i] ? 2 : 0);
        ctx.rect(i * wide, floor - tall, Math.max(wide - (wide > 3 ? 1 : 0), 0.7), tall);
      }
      ctx.fill();
    }
    this.glyphs(ctx, bins, flags, wide);
    const share = clamp((played - first + 0.5) / span, 0, 1);
    const x = clamp(share * width, 3, width - 3);
    ctx.fillStyle = look.color("paper");
    ctx.fillRect(x - 3, 0, 6, height);
    ctx.fillStyle = look.color("accent");
    ctx.fillRect(x - 1.5, 0, 3, height);
    ctx.beginPath();
    ctx.arc(x, 5, 5, 0, 7);
    ctx.fill();
  }

  // ▲ joined, ● finished, ✕ preempted, with room between; the rarest wins a crowded place.
  glyphs(ctx, bins, flags, wide) {
    const { look } = this.stage;
    let free = -Infinity;
    for (let i = 0; i < bins; i++) {
      const flag = flags[i];
      const x = clamp((i + 0.5) * wide, 5, bins * wide - 5);
      if (!flag || x < free) continue;
      free = x + 9;
      ctx.beginPath();
      if (flag & (PREEMPT | FAILED)) {
        ctx.strokeStyle = look.color("error");
        ctx.lineWidth = 2;
        for (const s of [-1, 1]) { ctx.moveTo(x - 3, 6 - 3 * s); ctx.lineTo(x + 3, 6 + 3 * s); }
        ctx.stroke();
      } else {
        ctx.fillStyle = look.color(flag & FINISH ? "good" : "ink");
        if (flag & FINISH) ctx.arc(x, 6, 3.2, 0, 7);
        else { ctx.moveTo(x, 2.5); ctx.lineTo(x + 3.8, 9); ctx.lineTo(x - 3.8, 9); }
        ctx.fill();
      }
    }
  }

  destroy() {
    this.observer.disconnect();
    this.draw.cancel();
  }
}
