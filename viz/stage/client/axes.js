// Plotly draws axes, pans and zooms; the canvas under it follows. Nothing that changes every step is a trace.
// Text of axes is escaped here, because Plotly reads a little HTML in it; views still keep prompts out of axes.
const AXIS = /^[xy]axis\d*$/;
const escapeAxis = (text) => String(text).slice(0, 200).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const PLOT_CONFIG = { displayModeBar: false, scrollZoom: true, doubleClick: false, responsive: false, showTips: false, displaylogo: false };

function cleanAxis(axis) {
  const clean = structuredClone(axis); // Plotly writes into the ranges that it is given
  if (clean.title !== undefined) clean.title = { ...(typeof clean.title === "object" ? clean.title : {}), text: escapeAxis((clean.title && clean.title.text) ?? clean.title) };
  for (const key of ["ticktext", "categoryarray"]) if (Array.isArray(clean[key])) clean[key] = clean[key].map(escapeAxis);
  for (const key of ["ticksuffix", "tickprefix"]) if (clean[key]) clean[key] = escapeAxis(clean[key]);
  return clean;
}

class Axes {
  constructor(host, look, onmove) {
    Object.assign(this, { host, look, onmove });
    this.div = h("div", { class: "glass-plotly" });
    host.append(this.div);
    this.home = {};
    this.user = {};
    this.shape = "";
    this.last = "";
    this.drawn = false;
    this.touched = 0;
    this.holding = false;
    this.bare = false; // no visible axes: the view lays out its own pixels, and the lens zooms all of them at once
    this.lens = { k: 1, x: 0, y: 0 };
    this.abort = new AbortController();
    const signal = this.abort.signal;
    this.div.addEventListener("pointerdown", () => { this.holding = true; }, { signal, capture: true });
    window.addEventListener("pointerup", () => { this.holding = false; }, { signal, capture: true });
    this.div.addEventListener("wheel", (e) => { this.touched = performance.now(); if (this.bare) this.magnify(e); }, { signal, capture: true, passive: false });
    this.div.addEventListener("pointermove", (e) => { if (this.bare && this.holding && this.lens.k > 1) this.shift(e.movementX, e.movementY); }, { signal });
  }

  get zoomed() { return Object.keys(this.user).length > 0 || this.lens.k > 1; }
  get moving() { return !this.bare && (this.holding || performance.now() - this.touched < 250); }

  // The point under the pointer stays where it is.
  magnify(event) {
    event.preventDefault();
    event.stopPropagation();
    const box = this.div.getBoundingClientRect(), { k, x, y } = this.lens;
    const scale = this.div.clientWidth / box.width || 1;
    const [px, py] = [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
    const grown = clamp(k * 1.0015 ** -event.deltaY, 1, 8);
    this.lookAt(grown, px - ((px - x) * grown) / k, py - ((py - y) * grown) / k);
  }

  shift(dx, dy) { this.lookAt(this.lens.k, this.lens.x + dx, this.lens.y + dy); }

  // The panel changed its size: the same part of the picture is seen.
  keepLens(width, height) {
    const [w, h_] = this.lensFor || [width, height];
    if (this.lens.k > 1 && (w !== width || h_ !== height)) this.lens = { k: this.lens.k, x: (this.lens.x * width) / w, y: (this.lens.y * height) / h_ };
    this.lensFor = [width, height];
  }

  // Never past the picture's edge.
  lookAt(k, x, y) {
    const [w, h_] = [this.host.clientWidth, this.host.clientHeight];
    this.lens = k <= 1.001 ? { k: 1, x: 0, y: 0 } : { k, x: clamp(x, w * (1 - k), 0), y: clamp(y, h_ * (1 - k), 0) };
    this.projections = null;
    this.onmove();
  }

  // Axes of a figure. Only ranges and ticks changed: a relayout; otherwise a react. Both leave the div in place.
  apply(figure, force = false) {
    if (!window.Plotly || (this.drawn && this.moving && !force)) { this.late = figure; return; }
    this.late = null;
    const named = Object.entries(figure.axes || {}).filter(([name]) => AXIS.test(name));
    if (!named.length) return this.clear();
    const [width, height] = [this.host.clientWidth, this.host.clientHeight];
    if (width < 40 || height < 40) return;
    this.keepLens(width, height);
    const last = JSON.stringify([named, width, height, this.look.generation]);
    if (last === this.last && !force) return;
    this.last = last;
    const axes = Object.fromEntries(named.map(([name, axis]) => [name, cleanAxis(axis)]));
    for (const [name, axis] of Object.entries(axes)) {
      this.home[name] = axis.range && axis.range.slice();
      if (this.user[name]) axis.range = this.user[name].slice();
    }
    const layout = this.layout(axes, width, height);
    const traces = this.traces(axes, figure);
    const moving = (axis) => ({ ...axis, range: 0, tickvals: 0, ticktext: 0 });
    const shape = JSON.stringify([Object.entries(axes).map(([n, a]) => [n, moving(a)]), traces, layout.margin, width, height, this.look.generation]);
    if (this.drawn && shape === this.shape && !force) {
      const changes = {};
      for (const [name, axis] of Object.entries(axes)) {
        for (const key of ["range", "tickvals", "ticktext"]) if (axis[key] !== undefined) changes[`${name}.${key}`] = axis[key];
      }
      Plotly.relayout(this.div, changes);
    } else if (this.drawn) {
      Plotly.react(this.div, traces, layout, PLOT_CONFIG);
    } else {
      Plotly.newPlot(this.div, traces, layout, PLOT_CONFIG);
      this.drawn = true;
      this.div.on("plotly_relayouting", (event) => this.moved(event));
      this.div.on("plotly_relayout", (event) => this.moved(event));
    }
    this.shape = shape;
    this.projections = null;
    if (this.wish) this.see(this.wish);
  }

  // What a link says of the zoom (viz/view.py): shares of a picture that lays out its own pixels, else the first axes' ranges.
  get seen() {
    if (!this.zoomed || !this.drawn) return this.wish || null;
    const { k, x, y } = this.lens, [w, h_] = [this.host.clientWidth, this.host.clientHeight], full = this.div._fullLayout;
    const four = this.bare ? [-x / (w * k), (w - x) / (w * k), -y / (h_ * k), (h_ - y) / (h_ * k)] : [...full.xaxis.range, ...full.yaxis.range].map(Number);
    return four.every(Number.isFinite) ? four.map((v) => Number(v.toPrecision(9))) : null;
  }

  see([x0, x1, y0, y1]) {
    this.wish = null;
    if (x0 === x1 || y0 === y1) return;
    if (this.bare) {
      const k = clamp(1 / (x1 - x0), 1, 8);
      return this.lookAt(k, -x0 * this.host.clientWidth * k, -y0 * this.host.clientHeight * k);
    }
    Object.assign(this.user, { xaxis: [x0, x1], yaxis: [y0, y1] });
    Plotly.relayout(this.div, { "xaxis.range": [x0, x1], "yaxis.range": [y0, y1] });
    this.projections = null;
    this.onmove();
  }

  layout(axes, width, height) {
    const { look } = this;
    const font = { family: FAMILY, size: look.font, color: look.color("ink") };
    const narrow = width < 560;
    const seen = Object.entries(axes).filter(([, a]) => a.visible !== false);
    const labelled = (letter) => seen.filter(([n, a]) => n[0] === letter && a.showticklabels !== false);
    const longest = Math.max(0, ...labelled("y").map(([, a]) => Math.max(4, ...(a.ticktext || []).map((t) => String(t).length))));
    const titled = (letter) => seen.some(([n, a]) => n[0] === letter && a.title && a.title.text);
    const em = look.font / 16;
    // A view without visible axes lays out its own pixels: the hub renders for sizes in steps of 20.
    const bare = (this.bare = !seen.length);
    const spare = [width >= 200 ? width % 20 : 0, height >= 120 ? height % 20 : 0];
    const margin = bare ? { l: Math.floor(spare[0] / 2), r: Math.ceil(spare[0] / 2), t: 0, b: spare[1], pad: 0 } : {
      l: Math.round(labelled("y").length ? Math.min(longest * 8.6 * em + 14, width * 0.4) + (titled("y") ? 26 * em : 6) : titled("y") ? 30 : 10),
      r: narrow ? 10 : 18,
      t: 10,
      b: Math.round(labelled("x").length ? (titled("x") ? 52 : 30) * em : titled("x") ? 30 * em : 10),
      pad: 0,
    };
    const layout = {
      width, height, margin, font, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: false,
      dragmode: width < 480 ? false : "pan", uirevision: "stage",
    };
    for (const [name, axis] of Object.entries(axes)) {
      const plain = {
        zeroline: false, linecolor: look.color("control"), tickcolor: look.color("control"), color: look.color("ink"), ticks: "outside", ticklen: 5,
        showline: true, automargin: false, tickfont: { size: look.font }, separatethousands: true, exponentformat: "SI",
      };
      const title = axis.title && { ...axis.title, font: { size: look.font, color: look.color("muted") }, standoff: 6 };
      layout[name] = { ...plain, ...axis, showgrid: false, zeroline: false, ...(title ? { title } : {}) };
    }
    return layout;
  }

  // One invisible trace a subplot keeps its axes alive.
  traces(axes, figure) {
    const pairs = new Set();
    const shortName = (name) => name.replace("axis", "");
    for (const [name, axis] of Object.entries(axes)) {
      const me = shortName(name);
      const anchor = axis.anchor && axis.anchor !== "free" ? axis.anchor : me[0] === "x" ? "y" : "x";
      pairs.add(me[0] === "x" ? me + anchor : anchor + me);
    }
    for (const item of [...(figure.rasters || []), ...(figure.series || [])]) pairs.add(item.axes);
    const known = (pair) => { const m = /^(x\d*)(y\d*)$/.exec(pair); return m && axes[m[1].replace("x", "xaxis")] && axes[m[2].replace("y", "yaxis")] && m; };
    return [...pairs].map(known).filter(Boolean).map((m) => ({ type: "scatter", mode: "lines", x: [null], y: [null], xaxis: m[1], yaxis: m[2], hoverinfo: "skip" }));
  }

  // A hand moves "xaxis.range[0]"; what we set ourselves arrives as "xaxis.range", later, and is not a wish.
  moved(event) {
    const names = Object.keys(event || {}).filter((key) => key.includes(".range[")).map((key) => key.split(".")[0]);
    if (!names.length) return;
    for (const name of names) if (this.div._fullLayout[name]) this.user[name] = this.div._fullLayout[name].range.slice();
    this.projections = null;
    this.onmove();
  }

  reset() {
    this.user = {};
    this.lens = { k: 1, x: 0, y: 0 };
    const changes = {};
    for (const [name, range] of Object.entries(this.home)) if (range && this.div._fullLayout[name]) changes[name + ".range"] = range.slice();
    if (this.drawn) Plotly.relayout(this.div, changes);
    this.projections = null;
    this.onmove();
  }

  // A view was exchanged: its zoom has no meaning for the next one.
  forget(wish = null) {
    this.wish = wish && wish.length === 4 ? wish : null;
    this.user = {};
    this.lens = { k: 1, x: 0, y: 0 };
    this.home = {};
    this.last = this.shape = "";
  }

  clear() {
    if (this.drawn) { Plotly.purge(this.div); this.drawn = false; this.shape = this.last = ""; }
    this.projections = null;
  }

  // {x(v), y(v), left, top, width, height, x0, x1, y0, y1} of a subplot "x2y"; null if it has no such axes.
  project(pair) {
    if (!this.projections) this.projections = new Map();
    let found = this.projections.get(pair);
    if (found === undefined) {
      found = this.measure(pair);
      this.projections.set(pair, found);
    }
    return found;
  }

  measure(pair) {
    const match = /^(x\d*)(y\d*)$/.exec(pair);
    const full = this.drawn && this.div._fullLayout;
    if (!match || !full) return null;
    const xa = full[match[1].replace("x", "xaxis")];
    const ya = full[match[2].replace("y", "yaxis")];
    if (!xa || !ya || !xa.range || !ya.range || !(xa._length > 0) || !(ya._length > 0)) return null;
    const [x0, x1] = xa.range.map(Number);
    const [y0, y1] = ya.range.map(Number);
    const lens = this.bare ? this.lens : { k: 1, x: 0, y: 0 };
    const width = xa._length * lens.k, height = ya._length * lens.k;
    const kx = width / (x1 - x0), ky = height / (y1 - y0);
    const left = xa._offset * lens.k + lens.x, top = ya._offset * lens.k + lens.y, bottom = top + height;
    const fx = xa.type === "log" ? (v) => left + (Math.log10(v) - x0) * kx : (v) => left + (v - x0) * kx;
    const fy = ya.type === "log" ? (v) => bottom - (Math.log10(v) - y0) * ky : (v) => bottom - (v - y0) * ky;
    const inverse = { x: (px) => { const v = (px - left) / kx + x0; return xa.type === "log" ? 10 ** v : v; }, y: (py) => { const v = (bottom - py) / ky + y0; return ya.type === "log" ? 10 ** v : v; } };
    const ticks = (axis) => (axis._vals || []).map((t) => t.x).filter(Number.isFinite);
    return { x: fx, y: fy, inverse, left, top, width, height, xticks: ticks(xa), yticks: ticks(ya) };
  }

  destroy() {
    this.abort.abort();
    if (this.drawn && window.Plotly) Plotly.purge(this.div);
  }
}
