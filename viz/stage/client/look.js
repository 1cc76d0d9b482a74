// Colours, colour maps, hatches and fonts as the canvas needs them, read once a theme from the CSS variables.
const FAMILY = '"Inter", -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", "Liberation Sans", Arial, sans-serif';

const MONO = '"DejaVu Sans Mono", "Liberation Mono", Menlo, Consolas, "Courier New", monospace';

class Look {
  constructor(root) {
    this.root = root;
    this.maps = null;
    this.read();
  }

  read() {
    this.theme = this.root.dataset.theme;
    this.css = getComputedStyle(this.root);
    this.colors = new Map();
    this.patterns = new Map();
    this.luts = new Map();
    this.font = parseInt(this.css.getPropertyValue("--g-font"), 10) || 16;
    this.generation = (this.generation || 0) + 1;
  }

  color(name) {
    let found = this.colors.get(name);
    if (found === undefined) {
      found = /^[a-z0-9-]+$/.test(name) ? this.css.getPropertyValue("--g-" + name).trim() : "";
      if (!found) found = name.endsWith("-line") || name.startsWith("on-") ? null : this.css.getPropertyValue("--g-ink").trim();
      this.colors.set(name, found);
    }
    return found;
  }

  line(name) { return this.color(name + "-line") || this.color(name); }
  on(name) { return this.color("on-" + name) || this.color("ink"); }

  // uint32 (little-endian RGBA) of 0…255 for a continuous map
  continuous(name) {
    const key = "map:" + name;
    if (!this.luts.has(key)) {
      const hex = this.maps && this.maps[this.theme] && this.maps[this.theme][name === "diverging" ? name : "sequential"];
      const lut = new Uint32Array(256);
      for (let i = 0; hex && i < 256; i++) {
        const [r, g, b] = [0, 2, 4].map((k) => parseInt(hex.substr(i * 6 + k, 2), 16));
        lut[i] = (255 << 24) | (b << 16) | (g << 8) | r;
      }
      this.luts.set(key, lut);
    }
    return this.luts.get(key);
  }

  // the same for categories; 255 and unknown classes are transparent
  categorical(paints) {
    const key = "cat:" + paints.map((p) => `${p.color}/${p.alpha}`).join();
    if (!this.luts.has(key)) {
      if (this.luts.size > 64) this.luts.clear();
      const lut = new Uint32Array(256);
      paints.forEach((paint, i) => {
        if (i > 254) return;
        const hex = this.color(paint.color);
        const [r, g, b] = [1, 3, 5].map((k) => parseInt(hex.substr(k, 2), 16));
        lut[i] = (Math.round(clamp(paint.alpha, 0, 1) * 255) << 24) | (b << 16) | (g << 8) | r;
      });
      this.luts.set(key, lut);
    }
    return this.luts.get(key);
  }

  // A hatch in a colour that stands out from its class, as a repeating pattern in device pixels.
  hatch(ctx, paint, scale) {
    if (!paint.hatch) return null;
    const key = `${paint.color}/${paint.hatch}/${scale}`;
    let found = this.patterns.get(key);
    if (!found) {
      const cross = paint.hatch === "cross", size = Math.round((cross ? 12 : 8) * scale); // wide and strong: no dots at half the size
      const tile = document.createElement("canvas");
      tile.width = tile.height = size;
      const pen = tile.getContext("2d");
      pen.strokeStyle = pen.fillStyle = this.hatchInk(paint.color, cross);
      pen.lineWidth = (cross ? 2 : 1.5) * scale;
      if (paint.hatch === "dots") {
        const dot = (x, y) => { pen.beginPath(); pen.arc(x * size, y * size, 1.3 * scale, 0, 7); pen.fill(); };
        dot(0.25, 0.25);
        dot(0.75, 0.75);
      } else {
        pen.beginPath();
        for (const k of [-1, 0, 1]) { pen.moveTo((k - 0.1) * size, 1.1 * size); pen.lineTo((k + 1.1) * size, -0.1 * size); }
        if (cross) for (const k of [-1, 0, 1]) { pen.moveTo((k - 0.1) * size, -0.1 * size); pen.lineTo((k + 1.1) * size, 1.1 * size); }
        pen.stroke();
      }
      found = ctx.createPattern(tile, "repeat");
      found.setTransform(new DOMMatrix([1 / scale, 0, 0, 1 / scale, 0, 0]));
      this.patterns.set(key, found);
    }
    return found;
  }

  hatchInk(name, strong = false) {
    if (name.startsWith("request-")) return this.on(name) + (this.on(name) === "#FFFFFF" ? "B0" : strong ? "A0" : "70");
    return this.line(name) + (name === "waste" ? "" : "90");
  }

  // Text takes the colour itself where it can be read, else its outline's.
  text(name) { return ["ink", "muted", "accent", "error", "good"].includes(name) ? this.color(name) : this.line(name); }

  fontOf(size, weight = 400, mono = false) { return `${weight} ${Math.max(size, this.font)}px ${mono ? MONO : FAMILY}`; }
}

// A legend swatch: the paint as it is drawn, 22 × 16 px.
function swatch(look, paint) {
  const scale = Math.min(window.devicePixelRatio || 1, 2);
  const canvas = h("canvas", { class: "glass-swatch", "aria-hidden": "true" });
  [canvas.width, canvas.height] = [22 * scale, 16 * scale];
  const ctx = canvas.getContext("2d");
  ctx.scale(scale, scale);
  ctx.beginPath();
  ctx.roundRect(1, 1, 20, 14, 3);
  ctx.globalAlpha = clamp(paint.alpha, 0, 1);
  ctx.fillStyle = look.color(paint.color);
  ctx.fill();
  const pattern = look.hatch(ctx, paint, scale);
  if (pattern) { ctx.fillStyle = pattern; ctx.fill(); }
  ctx.globalAlpha = 1;
  ctx.strokeStyle = look.line(paint.color);
  ctx.lineWidth = 1.5;
  ctx.stroke();
  return canvas;
}
