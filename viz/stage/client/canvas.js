// Draws one frame on a canvas: grid, cells, series, outlines, labels, selection. Pure of DOM except the context.
const MAX_RUNS = 4000;
const MAX_CELLS = 1600;
const MANY_RIGHT = 12;

class Painter {
  constructor(canvas, look) {
    Object.assign(this, { canvas, look });
    this.ctx = canvas.getContext("2d");
    this.cells = []; // one small canvas a raster, reused
  }

  resize(width, height) {
    const scale = Math.min((window.devicePixelRatio || 1) * Math.max(magnified, 1), 3, Math.max(2, magnified));
    const [w, h_] = [Math.round(width * scale), Math.round(height * scale)];
    if (this.canvas.width !== w || this.canvas.height !== h_) { this.canvas.width = w; this.canvas.height = h_; }
    Object.assign(this, { scale, width, height });
  }

  draw(model, axes, selection, focused, told = null) {
    const { ctx, scale } = this;
    ctx.setTransform(scale, 0, 0, scale, 0, 0);
    ctx.clearRect(0, 0, this.width, this.height);
    const { figure, items } = model;
    if (!figure || !items) return;
    this.grid(figure, axes);
    figure.rasters.forEach((raster, i) => this.raster(raster, model.rasters[i], items.places[i], axes.project(raster.axes), i));
    figure.series.forEach((series, i) => this.series(series, model.series[i], axes.project(series.axes)));
    this.outlines(items.marks, axes);
    this.labels(model, axes);
    this.chosen(items.marks, axes, selection, focused);
    if (told) this.answers(items.marks, axes, told);
  }

  clip(at) {
    this.ctx.save();
    this.ctx.beginPath();
    this.ctx.rect(at.left, at.top, at.width, at.height);
    this.ctx.clip();
  }

  grid(figure, axes) {
    const { ctx } = this;
    ctx.strokeStyle = this.look.color("grid");
    ctx.lineWidth = 1;
    const pairs = new Set([...figure.rasters, ...figure.series].map((x) => x.axes));
    for (const pair of pairs.size ? pairs : ["xy"]) {
      const at = axes.project(pair);
      if (!at) continue;
      const [, x, y] = /^(x\d*)(y\d*)$/.exec(pair);
      const shown = (name) => figure.axes[name] && figure.axes[name].showgrid;
      ctx.beginPath();
      if (shown(x.replace("x", "xaxis"))) for (const v of at.xticks) { const px = Math.round(at.x(v)) + 0.5; ctx.moveTo(px, at.top); ctx.lineTo(px, at.top + at.height); }
      if (shown(y.replace("y", "yaxis"))) for (const v of at.yticks) { const py = Math.round(at.y(v)) + 0.5; ctx.moveTo(at.left, py); ctx.lineTo(at.left + at.width, py); }
      ctx.stroke();
    }
  }

  // ---- rasters ----

  raster(raster, values, place, at, index) {
    if (!at || !values || !place) return;
    const [rows, cols] = values.shape;
    if (!rows || !cols) return;
    const [x0, x1, y0, y1] = place;
    const [px0, px1, py0, py1] = [at.x(x0), at.x(x1), at.y(y0), at.y(y1)];
    const [cw, ch] = [(px1 - px0) / cols, (py1 - py0) / rows];
    const first = (a, size, from, to) => clamp(Math.floor(Math.min((from - a) / size, (to - a) / size)), 0, Infinity);
    const last = (a, size, from, to, n) => clamp(Math.ceil(Math.max((from - a) / size, (to - a) / size)), 0, n);
    const box = {
      c0: first(px0, cw, at.left, at.left + at.width), c1: last(px0, cw, at.left, at.left + at.width, cols),
      r0: first(py0, ch, at.top, at.top + at.height), r1: last(py0, ch, at.top, at.top + at.height, rows),
    };
    if (box.c1 <= box.c0 || box.r1 <= box.r0) return;
    this.clip(at);
    const grid = { px0, py0, cw, ch, ...box };
    const few = (box.c1 - box.c0) * (box.r1 - box.r0) <= MAX_CELLS && Math.min(Math.abs(cw), Math.abs(ch)) >= 11;
    if (raster.paints && few) this.cellByCell(raster.paints, values.data, cols, grid);
    else {
      this.image(raster, values, px0, py0, px1, py1, index);
      if (raster.paints) { this.hatches(raster.paints, values.data, cols, grid); this.gaps(grid); }
    }
    this.ctx.restore();
  }

  // Every cell one pixel of a small canvas, stretched without smoothing.
  image(raster, { data, shape: [rows, cols] }, px0, py0, px1, py1, index) {
    const lut = raster.paints ? this.look.categorical(raster.paints) : this.look.continuous(raster.colormap);
    let cell = this.cells[index];
    if (!cell || cell.canvas.width !== cols || cell.canvas.height !== rows) {
      const canvas = document.createElement("canvas");
      [canvas.width, canvas.height] = [cols, rows];
      const ctx = canvas.getContext("2d");
      const pixels = ctx.createImageData(cols, rows);
      cell = this.cells[index] = { canvas, ctx, pixels, words: new Uint32Array(pixels.data.buffer) };
    }
    const { words } = cell;
    for (let i = 0; i < data.length; i++) words[i] = lut[data[i]];
    cell.ctx.putImageData(cell.pixels, 0, 0);
    const { ctx } = this;
    ctx.imageSmoothingEnabled = false;
    ctx.save();
    ctx.translate(px0, py0);
    ctx.scale(px1 < px0 ? -1 : 1, py1 < py0 ? -1 : 1);
    ctx.drawImage(cell.canvas, 0, 0, Math.abs(px1 - px0), Math.abs(py1 - py0));
    ctx.restore();
  }

  // Few and large cells: rounded, outlined, hatched each.
  cellByCell(paints, data, cols, { px0, py0, cw, ch, c0, c1, r0, r1 }) {
    const { ctx, look } = this;
    const [w, h_] = [Math.abs(cw), Math.abs(ch)];
    const gap = Math.min(w, h_) >= 24 ? 1.5 : Math.min(w, h_) >= 16 ? 1 : 0.5;
    const round = clamp(Math.min(w, h_) / 7, 0, 5);
    const paths = new Map();
    for (let r = r0; r < r1; r++) {
      for (let c = c0; c < c1; c++) {
        const kind = data[r * cols + c];
        if (kind >= paints.length) continue;
        let path = paths.get(kind);
        if (!path) paths.set(kind, (path = new Path2D()));
        const x = Math.min(px0 + c * cw, px0 + (c + 1) * cw) + gap, y = Math.min(py0 + r * ch, py0 + (r + 1) * ch) + gap;
        if (round >= 2) path.roundRect(x, y, w - 2 * gap, h_ - 2 * gap, round);
        else path.rect(x, y, w - 2 * gap, h_ - 2 * gap);
      }
    }
    for (const [kind, path] of paths) {
      const paint = paints[kind];
      this.fill(paint, path);
      ctx.strokeStyle = look.line(paint.color);
      ctx.lineWidth = Math.min(w, h_) >= 18 ? 1.5 : 1;
      ctx.globalAlpha = paint.color === "free" ? 0.45 : clamp(paint.alpha, 0.5, 1);
      ctx.stroke(path);
      ctx.globalAlpha = 1;
    }
  }

  fill(paint, path) {
    const { ctx, look } = this;
    ctx.globalAlpha = clamp(paint.alpha, 0, 1);
    ctx.fillStyle = look.color(paint.color);
    ctx.fill(path);
    const pattern = look.hatch(ctx, paint, this.scale);
    if (pattern) { ctx.fillStyle = pattern; ctx.fill(path); }
    ctx.globalAlpha = 1;
  }

  // Many small cells: only the hatched classes are drawn over, run by run of equal cells.
  hatches(paints, data, cols, { px0, py0, cw, ch, c0, c1, r0, r1 }) {
    const hatched = paints.map((p) => Boolean(p.hatch));
    if (!hatched.includes(true) || Math.abs(ch) < 3) return;
    const paths = new Map();
    let runs = 0;
    for (let r = r0; r < r1; r++) {
      for (let c = c0; c < c1; ) {
        const kind = data[r * cols + c];
        let end = c + 1;
        while (end < c1 && data[r * cols + end] === kind) end++;
        if (hatched[kind]) {
          if (++runs > MAX_RUNS) return;
          let path = paths.get(kind);
          if (!path) paths.set(kind, (path = new Path2D()));
          path.rect(px0 + c * cw, py0 + r * ch, (end - c) * cw, ch);
        }
        c = end;
      }
    }
    for (const [kind, path] of paths) {
      this.ctx.fillStyle = this.look.hatch(this.ctx, paints[kind], this.scale);
      this.ctx.fill(path);
    }
  }

  // Paper-coloured lines between rows or columns that are wide enough to tell apart.
  gaps({ px0, py0, cw, ch, c0, c1, r0, r1 }) {
    const { ctx } = this;
    ctx.beginPath();
    const [left, right, top, bottom] = [px0 + c0 * cw, px0 + c1 * cw, py0 + r0 * ch, py0 + r1 * ch];
    if (Math.abs(ch) >= 9) for (let r = r0 + 1; r < r1; r++) { ctx.moveTo(left, py0 + r * ch); ctx.lineTo(right, py0 + r * ch); }
    if (Math.abs(cw) >= 9) for (let c = c0 + 1; c < c1; c++) { ctx.moveTo(px0 + c * cw, top); ctx.lineTo(px0 + c * cw, bottom); }
    ctx.strokeStyle = this.look.color("paper");
    ctx.lineWidth = Math.abs(ch) >= 24 ? 2 : 1;
    ctx.stroke();
  }

  // ---- series ----

  series(series, arrays, at) {
    if (!at || !arrays) return;
    this.clip(at);
    const { ctx, look } = this;
    const { x, y, base } = arrays;
    ctx.globalAlpha = clamp(series.paint.alpha, 0, 1);
    if (series.kind === "bars") this.bars(series, x, y, base, at);
    else if (series.kind === "markers") this.markers(series, x, y, at);
    else {
      ctx.beginPath();
      let down = false;
      for (let i = 0; i < x.length; i++) {
        const [px, py] = [at.x(x[i]), at.y(y[i])];
        if (!Number.isFinite(px) || !Number.isFinite(py)) { down = false; continue; }
        if (!down) ctx.moveTo(px, py);
        else { if (series.kind === "steps") ctx.lineTo(px, at.y(y[i - 1])); ctx.lineTo(px, py); }
        down = true;
      }
      ctx.strokeStyle = look.line(series.paint.color);
      ctx.lineWidth = series.width * (look.font > 16 ? 1.4 : 1);
      ctx.lineJoin = "round";
      ctx.setLineDash(series.paint.hatch ? [7, 5] : []);
      ctx.stroke();
      ctx.setLineDash([]);
    }
    ctx.globalAlpha = 1;
    ctx.restore();
  }

  bars(series, x, y, base, at) {
    const path = new Path2D();
    const half = series.width / 2;
    let widest = 0;
    for (let i = 0; i < x.length; i++) {
      const [a, b, c, d] = [at.x(x[i] - half), at.x(x[i] + half), at.y(base ? base[i] : 0), at.y(y[i])];
      if (!Number.isFinite(a + b + d) || c === d) continue;
      const c_ = Number.isFinite(c) ? c : at.top + at.height;
      widest = Math.max(widest, Math.abs(b - a));
      path.rect(Math.min(a, b), Math.min(c_, d), Math.max(Math.abs(b - a), 1), Math.abs(d - c_));
    }
    this.fill(series.paint, path);
    if (widest >= 5) { this.ctx.strokeStyle = this.look.line(series.paint.color); this.ctx.lineWidth = 1; this.ctx.stroke(path); }
  }

  markers(series, x, y, at) {
    const { ctx, look } = this;
    const radius = Math.max(series.width, 5) / 2 * (look.font > 16 ? 1.3 : 1);
    const open = series.symbol.startsWith("x") || series.symbol.startsWith("cross");
    const path = new Path2D();
    for (let i = 0; i < x.length; i++) {
      const [px, py] = [at.x(x[i]), at.y(y[i])];
      if (Number.isFinite(px) && Number.isFinite(py)) symbol(path, series.symbol, px, py, radius);
    }
    ctx.strokeStyle = look.line(series.paint.color);
    ctx.lineWidth = open ? Math.max(radius / 2, 2) : 1.5;
    if (!open) { ctx.fillStyle = look.color(series.paint.color); ctx.fill(path); }
    ctx.stroke(path);
  }

  // ---- marks and labels ----

  box(mark, axes) {
    const at = axes.project(mark[8]);
    if (!at) return null;
    const [a, b, c, d] = [at.x(mark[1]), at.x(mark[2]), at.y(mark[3]), at.y(mark[4])];
    const x = Math.max(Math.min(a, b), at.left), y = Math.max(Math.min(c, d), at.top);
    const right = Math.min(Math.max(a, b), at.left + at.width), bottom = Math.min(Math.max(c, d), at.top + at.height);
    return right > x && bottom > y ? { x, y, w: right - x, h: bottom - y } : null;
  }

  outlines(marks, axes) {
    const paths = new Map();
    for (const mark of marks) {
      if (!mark[6]) continue;
      const box = this.box(mark, axes);
      if (!box) continue;
      let path = paths.get(mark[6]);
      if (!path) paths.set(mark[6], (path = new Path2D()));
      path.rect(box.x + 1, box.y + 1, Math.max(box.w - 2, 1), Math.max(box.h - 2, 1));
    }
    this.ctx.lineWidth = 2;
    for (const [color, path] of paths) { this.ctx.strokeStyle = this.look.line(color); this.ctx.stroke(path); }
  }

  chosen(marks, axes, selection, focused) {
    const { ctx, look } = this;
    for (const mark of marks) {
      const isChosen = mark[0] === selection, isFocused = mark[0] === focused;
      if (!isChosen && !isFocused) continue;
      const box = this.box(mark, axes);
      if (!box) continue;
      for (const [color, width] of [[look.color("paper"), 7], [isChosen ? look.color("ink") : look.color("accent"), 3.5]]) {
        ctx.strokeStyle = color;
        ctx.lineWidth = width;
        ctx.setLineDash(isFocused && !isChosen && width < 7 ? [6, 4] : []);
        ctx.beginPath();
        ctx.roundRect(box.x, box.y, box.w, box.h, 4);
        ctx.stroke();
      }
      ctx.setLineDash([]);
    }
  }

  // A guess is dashed; what was right is solid with a tick, a wrong guess dashed with a cross: never by colour alone.
  // Where nearly everything is right, only the guess keeps its sign.
  answers(marks, axes, { kinds, guess }) {
    const { ctx, look } = this, unit = look.font / 16, many = kinds.size > MANY_RIGHT;
    for (const mark of marks) {
      const kind = kinds.get(mark[0]), thin = many && mark[0] !== guess, box = kind && this.box(mark, axes);
      if (!box) continue;
      const color = look.color({ guess: "accent", right: "good", wrong: "error" }[kind]);
      for (const [stroke, width] of thin ? [[color, 2]] : [[look.color("paper"), 8], [color, 4]]) {
        ctx.strokeStyle = stroke;
        ctx.lineWidth = width;
        ctx.setLineDash(kind !== "right" && width < 8 ? [7, 4] : []);
        ctx.beginPath();
        ctx.roundRect(box.x + 1, box.y + 1, Math.max(box.w - 2, 2), Math.max(box.h - 2, 2), 5);
        ctx.stroke();
      }
      ctx.setLineDash([]);
      if (kind !== "guess" && !thin && Math.min(box.w, box.h) >= 13) this.sign(kind, box.x + box.w, box.y, 7.5 * unit, color);
    }
  }

  sign(kind, right, top, radius, color) {
    const { ctx, look } = this, x = clamp(right - radius * 0.6, radius, this.width - radius), y = Math.max(top + radius * 0.6, radius);
    ctx.beginPath();
    ctx.arc(x, y, radius, 0, 7);
    ctx.fillStyle = color;
    ctx.fill();
    ctx.strokeStyle = look.color("paper");
    ctx.lineWidth = radius / 4;
    ctx.stroke();
    ctx.beginPath();
    const line = (...points) => points.forEach(([a, b], i) => ctx[i ? "lineTo" : "moveTo"](x + a * radius, y + b * radius));
    if (kind === "right") line([-0.48, 0.02], [-0.12, 0.4], [0.5, -0.36]);
    else { line([-0.38, -0.38], [0.38, 0.38]); line([0.38, -0.38], [-0.38, 0.38]); }
    ctx.lineWidth = radius / 3.4;
    ctx.stroke();
  }

  labels(model, axes) {
    const { ctx, look } = this;
    ctx.textBaseline = "middle";
    ctx.lineJoin = "round";
    for (const [text, x, y, color, anchor, size, weight, pair, mono] of model.items.labels) {
      const at = axes.project(pair);
      if (!at) continue;
      const [px, py] = [at.x(x), at.y(y)];
      if (!(px >= at.left - 1 && px <= at.left + at.width + 1 && py >= at.top - 1 && py <= at.top + at.height + 1)) continue;
      ctx.font = look.fontOf(size, weight, mono);
      ctx.textAlign = anchor;
      const shown = short(text, 160);
      const middle = anchor === "center" ? px : px + (anchor === "right" ? -5 : 5);
      const under = ["ink", "paper", "muted"].includes(color) ? this.under(model, axes, middle, py) : null;
      if (under) ctx.fillStyle = look.on(under);
      else if (color.startsWith("on-")) ctx.fillStyle = look.color(color);
      else {
        ctx.strokeStyle = look.color("paper");
        ctx.lineWidth = 3.5;
        ctx.strokeText(shown, px, py + 1);
        ctx.fillStyle = color === "paper" ? look.color("ink") : look.text(color);
      }
      ctx.fillText(shown, px, py + 1);
    }
  }

  // The colour name of the bar or categorical cell under a pixel: text on it takes that colour's own ink.
  under(model, axes, px, py) {
    const { figure, items } = model;
    const inside = (at) => at && px >= at.left && px <= at.left + at.width && py >= at.top && py <= at.top + at.height;
    for (let i = figure.series.length - 1; i >= 0; i--) {
      const series = figure.series[i], data = model.series[i];
      if (series.kind !== "bars" || !data || data.x.length > 400 || series.paint.alpha < 0.5) continue;
      const at = axes.project(series.axes);
      if (!inside(at)) continue;
      const [x, y] = [at.inverse.x(px), at.inverse.y(py)];
      for (let k = 0; k < data.x.length; k++) {
        const low = data.base ? data.base[k] : 0;
        if (Math.abs(x - data.x[k]) <= series.width / 2 && y >= Math.min(low, data.y[k]) && y <= Math.max(low, data.y[k])) return series.paint.color;
      }
    }
    for (let i = figure.rasters.length - 1; i >= 0; i--) {
      const raster = figure.rasters[i];
      if (!raster.paints || !model.rasters[i]) continue;
      const at = axes.project(raster.axes);
      if (!inside(at)) continue;
      const paint = raster.paints[valueAt(model.rasters[i], items.places[i], at.inverse.x(px), at.inverse.y(py))];
      if (paint && paint.alpha > 0.5) return paint.color;
    }
    return null;
  }
}

// The Plotly marker symbols that views use.
function symbol(path, name, x, y, r) {
  const shape = (...points) => { points.forEach(([a, b], i) => (i ? path.lineTo(x + a * r, y + b * r) : path.moveTo(x + a * r, y + b * r))); path.closePath(); };
  if (name.startsWith("x")) for (const s of [-1, 1]) { path.moveTo(x - r * 0.8, y - s * r * 0.8); path.lineTo(x + r * 0.8, y + s * r * 0.8); }
  else if (name.startsWith("cross")) { path.moveTo(x - r, y); path.lineTo(x + r, y); path.moveTo(x, y - r); path.lineTo(x, y + r); }
  else if (name === "square") shape([-0.9, -0.9], [0.9, -0.9], [0.9, 0.9], [-0.9, 0.9]);
  else if (name === "diamond") shape([0, -1.1], [1.1, 0], [0, 1.1], [-1.1, 0]);
  else if (name === "triangle-up") shape([0, -1], [1, 0.85], [-1, 0.85]);
  else if (name === "triangle-down") shape([0, 1], [1, -0.85], [-1, -0.85]);
  else if (name === "triangle-right") shape([1, 0], [-0.85, 1], [-0.85, -1]);
  else if (name === "triangle-left") shape([-1, 0], [0.85, 1], [0.85, -1]);
  else { path.moveTo(x + r, y); path.arc(x, y, r, 0, 6.2832); }
}

function valueAt({ data, shape: [rows, cols] }, [x0, x1, y0, y1], x, y) {
  const [c, r] = [Math.floor(((x - x0) / (x1 - x0)) * cols), Math.floor(((y - y0) / (y1 - y0)) * rows)];
  return c >= 0 && r >= 0 && c < cols && r < rows ? data[r * cols + c] : 255;
}
