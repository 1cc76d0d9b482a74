// One panel: head (view menu, badges, legend), what it offers, a canvas under Plotly axes, marks for pointer and keyboard,
// and the view's documents beside them.
class Panel {
  // `stage`: select(id), inspect(text, detail), setView(panel, name), toggleMax(panel), asks for redraws.
  constructor(stage, index) {
    Object.assign(this, { stage, index, look: stage.look });
    this.view = null;
    this.model = null;
    this.focusAt = -1;
    this.draw = onFrame(() => this.paint());
    this.build();
    this.painter = new Painter(this.canvas, this.look);
    this.axes = new Axes(this.plot, this.look, () => { this.zoomButton.hidden = !this.axes.zoomed; this.draw(); stage.zoomed(); });
    this.plot.append(this.focus, this.tip, this.note, this.zoomButton);
    this.observer = new ResizeObserver(() => this.resized());
    this.observer.observe(this.plot);
    this.listen();
  }

  build() {
    const label = `${WORDS.viewMenu} ${this.index + 1}`;
    this.menu = h("select", { class: "glass-view", "aria-label": label, onchange: () => this.stage.setView(this, this.menu.value) });
    this.question = h("span", { class: "glass-question" });
    this.badges = h("span", { class: "glass-badges" });
    this.tabs = h("span", { class: "glass-tabs", role: "tablist", "aria-label": WORDS.viewMenu, hidden: true });
    this.zoomButton = h("button", { type: "button", class: "glass-button glass-text glass-reset", text: WORDS.reset, hidden: true, onclick: () => this.axes.reset() });
    this.maxButton = iconButton("max", WORDS.maximise, () => this.stage.toggleMax(this), { class: "glass-button glass-max" });
    this.legend = h("div", { class: "glass-legend" }, this.question);
    this.canvas = h("canvas", { class: "glass-canvas", role: "img", "aria-label": "" });
    this.option = h("div", { role: "option", id: `glass-mark-${this.index}-${Math.random().toString(36).slice(2)}`, "aria-selected": "false" });
    this.focus = h("div", { class: "glass-focus", tabIndex: 0 });
    this.tip = h("div", { class: "glass-tip", hidden: true, "aria-hidden": "true" });
    this.note = h("div", { class: "glass-note", hidden: true });
    this.plot = h("div", { class: "glass-plot" }, this.canvas);
    this.area = h("div", { class: "glass-area" }, this.plot);
    this.offers = new Offers(this);
    this.documents = new Documents(this);
    this.area.append(this.documents.root);
    const head = h("header", { class: "glass-panel-head" }, this.menu, this.tabs, this.badges, this.maxButton);
    this.root = h("section", { class: "glass-panel" }, head, this.legend, this.offers.root, this.area);
  }

  // ---- what it shows ----

  show(name, catalogue) {
    if (this.view === name) return;
    this.view = name;
    this.model = this.stage.models.get(name) || null;
    this.focusAt = -1;
    this.axes.forget(this.stage.arrived ? null : this.stage.state.ranges.slice(4 * this.index, 4 * this.index + 4));
    this.zoomButton.hidden = true;
    this.stage.zoomed();
    if (this.menu.options.length !== catalogue.length) this.menu.replaceChildren(...catalogue.map((v) => h("option", { value: v.name, text: v.title })));
    this.menu.value = name;
    const found = catalogue.find((v) => v.name === name);
    setText(this.question, found ? found.question : "");
    this.root.setAttribute("aria-label", found ? found.title : name);
    this.figureSeen = this.itemsSeen = null;
    if (!this.model) { this.axes.clear(); this.setNote(WORDS.waitingForFrame); }
    this.beside();
    this.draw();
  }

  // What stands around the picture; also when only the source or the people of the room changed.
  beside() {
    this.offers.show(this.model && this.model.figure);
    this.documents.show(this.model && this.model.documents);
  }

  // A part of the model changed: heads and legends only when the figure did.
  update() {
    this.model = this.stage.models.get(this.view) || null;
    if (!this.model) return;
    const { figure, items } = this.model;
    if (figure !== this.figureSeen) this.head(figure);
    if (items !== this.itemsSeen) this.describe(items);
    this.itemsSeen = items;
    this.beside();
  }

  head(figure) {
    const badges = JSON.stringify([figure.badges, spoken]), legends = JSON.stringify([figure.legend, this.rasterKeys(figure), this.look.generation]);
    if (badges !== this.badged) {
      this.badged = badges;
      this.badges.replaceChildren(...figure.badges.map((badge) => this.badge(badge)));
    }
    if (legends !== this.legends) {
      this.legends = legends;
      this.legend.replaceChildren(this.question, ...figure.legend.filter((p) => p.label).map((p) => h("span", { class: "glass-key" }, swatch(this.look, p), h("span", { text: p.label }))));
      this.scales(figure);
    }
    this.legend.hidden = this.legend.childElementCount < 2 && !this.question.textContent;
    this.fitLegend();
    this.setNote(figure.error || (!window.Plotly ? WORDS.waitingForFrame : Object.keys(figure.axes).length ? "" : this.model.items ? this.model.items.summary : ""), Boolean(figure.error));
    this.figureSeen = figure;
  }

  // The legend matters more than the question: where both do not fit, the question goes.
  fitLegend() {
    this.question.hidden = false;
    if (this.stage.phone) return;
    if (this.legend.childElementCount > 1 && this.legend.scrollHeight > 2.6 * this.look.font + 8) this.question.hidden = true;
  }

  rasterKeys(figure) { return figure.rasters.filter((r) => !r.paints).map((r) => [r.name, r.colormap, r.unit]); }

  badge(badge) {
    const kind = WORDS.kind[badge.kind] || badge.kind, text = badge.text ? `${kind} · ${badge.text}` : kind;
    const known = WORDS.badges[badge.kind] || "";
    return h("button", { type: "button", class: text.length > 16 ? "glass-badge glass-long" : "glass-badge", "data-kind": badge.kind, title: text, "aria-label": text, onclick: () => this.stage.inspect(known, badge.text) },
      h("span", { text: kind }), badge.text ? h("span", { class: "glass-fine", text: ` · ${badge.text}` }) : null);
  }

  // Colour bars of continuous rasters: a strip with what its ends stand for.
  scales(figure) {
    this.bars = figure.rasters.map((raster) => {
      if (raster.paints) return null;
      const canvas = h("canvas", { class: "glass-scale", "aria-hidden": "true", width: 256, height: 1 });
      const ctx = canvas.getContext("2d");
      const pixels = ctx.createImageData(256, 1);
      new Uint32Array(pixels.data.buffer).set(this.look.continuous(raster.colormap));
      ctx.putImageData(pixels, 0, 0);
      const [low, high] = [h("span"), h("span")];
      const name = raster.unit || raster.name;
      this.legend.append(h("span", { class: "glass-key" }, h("span", { text: name }), low, canvas, high));
      return { low, high };
    });
  }

  describe(items) {
    (this.bars || []).forEach((bar, i) => {
      if (!bar || !items.ranges[i]) return;
      setText(bar.low, numberText(items.ranges[i][0]));
      setText(bar.high, numberText(items.ranges[i][1]));
    });
    this.summary = items.summary || this.root.getAttribute("aria-label");
    if (this.summary !== this.spoken && !this.speaking) {
      this.speaking = setTimeout(() => { this.speaking = 0; if (this.model && this.model.items) this.describe(this.model.items); }, 1000);
      this.spoken = this.summary;
      this.canvas.setAttribute("aria-label", this.summary);
    }
    this.refocus();
  }

  setNote(text, isError = false) {
    this.note.hidden = !text;
    this.note.classList.toggle("glass-bad", isError);
    setText(this.note, text);
  }

  paint() {
    if (!this.root.isConnected || this.root.hidden || !this.plot.clientWidth) return;
    this.painter.resize(this.plot.clientWidth, this.plot.clientHeight);
    if (this.model && this.model.figure) this.axes.apply(this.model.figure);
    else this.axes.clear();
    const marks = this.marks();
    const focused = this.hasFocus && marks[this.focusAt] ? marks[this.focusAt][0] : null;
    this.painter.draw(this.model || {}, this.axes, this.stage.state.selection, focused, this.stage.tour.outlined());
    if (this.axes.late) this.draw.again ? null : setTimeout(this.draw, 120);
  }

  resized() {
    if (!this.plot.clientWidth) return;
    this.fitLegend();
    this.draw();
    this.stage.sized();
  }

  size() { return { view: this.view, w: this.plot.clientWidth || 960, h: this.plot.clientHeight || 540 }; }

  restyle() {
    this.legends = null;
    if (this.model && this.model.figure) { this.figureSeen = null; this.update(); }
    this.draw();
  }

  // ---- marks ----

  marks() { return this.model && this.model.items ? this.model.items.marks : []; }

  listen() {
    const signal = this.stage.signal;
    const on = (target, name, action, extra = {}) => target.addEventListener(name, action, { signal, ...extra });
    on(this.plot, "pointerdown", (e) => { this.pressed = [e.clientX, e.clientY]; }, { capture: true });
    on(window, "pointerup", (e) => this.released(e), { capture: true }); // Plotly covers the page while a button is down
    on(this.plot, "pointermove", (e) => { this.pointer = [e.clientX, e.clientY]; this.hover(); }, { passive: true });
    on(this.plot, "pointerleave", () => { this.pointer = null; this.tip.hidden = true; });
    on(this.focus, "keydown", (e) => this.key(e));
    on(this.focus, "focus", () => { this.hasFocus = true; this.refocus(true); this.draw(); });
    on(this.focus, "blur", () => { this.hasFocus = false; this.draw(); });
    this.hover = onFrame(() => this.tipAt());
  }

  released(event) {
    const from = this.pressed;
    this.pressed = null;
    if (from) this.pointer = [event.clientX, event.clientY]; // Plotly's cover made it leave
    this.hover();
    if (!from || Math.hypot(event.clientX - from[0], event.clientY - from[1]) > 4) return;
    const twice = event.timeStamp - (this.clickedAt || -1e9) < 450;
    this.clickedAt = twice ? -1e9 : event.timeStamp;
    if (twice && this.axes.zoomed) return this.axes.reset();
    const asked = this.hit(event.clientX, event.clientY, (mark) => this.stage.tour.guessable(mark));
    const at = asked >= 0 ? asked : this.hit(event.clientX, event.clientY);
    if (at < 0) return;
    this.focusAt = at;
    this.choose(at);
  }

  local(clientX, clientY) {
    const box = this.plot.getBoundingClientRect();
    const k = this.plot.clientWidth / box.width || 1; // the whole page may be scaled
    return [(clientX - box.left) * k, (clientY - box.top) * k];
  }

  // The smallest mark under a point: marks may lie inside each other.
  hit(clientX, clientY, fits = () => true) {
    const [px, py] = this.local(clientX, clientY);
    let best = -1, area = Infinity;
    this.marks().forEach((mark, i) => {
      const box = fits(mark) && this.painter.box(mark, this.axes);
      if (!box || px < box.x - 2 || px > box.x + box.w + 2 || py < box.y - 2 || py > box.y + box.h + 2) return;
      if (box.w * box.h < area) [best, area] = [i, box.w * box.h];
    });
    return best;
  }

  choose(at) {
    const mark = this.marks()[at];
    if (!mark) return;
    if (this.stage.tour.guessable(mark)) { this.stage.tour.guess(mark); return this.refocus(); }
    if (mark[0].endsWith(":play")) return this.replay(mark[0].slice(0, -5));
    if (mark[0].startsWith("axis:")) return this.stage.setState({ axis: mark[0].slice(5) });
    this.stage.select(mark[0] === this.stage.state.selection ? null : mark[0], mark);
    this.refocus();
  }

  // Choose the marks kind:0, kind:1, … one after the other, each once its frame is there; then none. Another choice ends it.
  replay(kind) {
    clearTimeout(this.replaying);
    let at = 0, waited = 0;
    const next = () => {
      const before = at ? `${kind}:${at - 1}` : null;
      if (!this.root.isConnected || (before && this.stage.state.selection !== before)) return;
      const there = (k) => this.marks().some((m) => m[0] === `${kind}:${k}`);
      if (!at || there(at)) { this.stage.select(`${kind}:${at}`); at += 1; waited = 0; }
      else if (there(at - 1) || (waited += 1) > 20) return void this.stage.select(null); // that was the last one
      this.replaying = setTimeout(next, this.stage.calm.matches ? 1000 : 350);
    };
    next();
  }

  tipAt() {
    if (!this.pointer || this.axes.holding) return void (this.tip.hidden = true);
    const at = this.hit(...this.pointer);
    const text = at >= 0 ? this.marks()[at][5] : this.valueText(...this.local(...this.pointer));
    this.tip.hidden = !text;
    if (!text) return;
    setText(this.tip, short(text, 160));
    const [px, py] = this.local(...this.pointer);
    const [w, h_] = [this.tip.offsetWidth, this.tip.offsetHeight];
    const x = clamp(px + 14, 4, Math.max(this.plot.clientWidth - w - 4, 4)), y = py + 20 + h_ > this.plot.clientHeight ? py - h_ - 10 : py + 18;
    this.tip.style.transform = `translate(${Math.round(x)}px, ${Math.round(Math.max(y, 2))}px)`;
  }

  // Hover over cells without a mark: their class or their value.
  valueText(px, py) {
    if (!this.model || !this.model.figure || !this.model.items) return "";
    const { figure, items, rasters } = this.model;
    for (let i = figure.rasters.length - 1; i >= 0; i--) {
      const raster = figure.rasters[i], at = this.axes.project(raster.axes);
      if (!at || px < at.left || px > at.left + at.width || py < at.top || py > at.top + at.height) continue;
      const value = valueAt(rasters[i], items.places[i], at.inverse.x(px), at.inverse.y(py));
      if (raster.paints) { if (raster.paints[value] && raster.paints[value].label) return raster.paints[value].label; continue; }
      const [low, high] = items.ranges[i] || [0, 255];
      return `${numberText(low + ((high - low) * value) / 255)} ${raster.unit}`.trim();
    }
    return "";
  }

  // One element speaks for all marks: the list's only option is the mark under the arrows.
  refocus(first = false) {
    const marks = this.marks();
    if (!marks.length) {
      if (this.focus.getAttribute("role") !== "note") { this.focus.setAttribute("role", "note"); this.focus.replaceChildren(); this.focus.removeAttribute("aria-activedescendant"); }
      this.focus.setAttribute("aria-label", this.root.getAttribute("aria-label") || "");
      return;
    }
    if (this.focus.getAttribute("role") !== "listbox") {
      this.focus.setAttribute("role", "listbox");
      this.focus.replaceChildren(this.option);
      this.focus.setAttribute("aria-activedescendant", this.option.id);
    }
    if (first && this.focusAt < 0) this.focusAt = Math.max(marks.findIndex((m) => m[0] === this.stage.state.selection), 0);
    this.focusAt = Math.min(this.focusAt, marks.length - 1);
    const mark = marks[Math.max(this.focusAt, 0)];
    const say = [mark[5], String(mark[0] === this.stage.state.selection), marks.length, Math.max(this.focusAt, 0) + 1].join("\n");
    if (say === this.said) return;
    this.said = say;
    this.focus.setAttribute("aria-label", this.root.getAttribute("aria-label") || "");
    setText(this.option, mark[5]);
    this.option.setAttribute("aria-selected", String(mark[0] === this.stage.state.selection));
    this.option.setAttribute("aria-setsize", marks.length);
    this.option.setAttribute("aria-posinset", Math.max(this.focusAt, 0) + 1);
  }

  key(event) {
    const direction = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    const marks = this.marks();
    if (!marks.length || event.ctrlKey || event.metaKey || event.altKey) return;
    if (direction && event.shiftKey) this.focusAt = (this.focusAt + marks.length + direction[0] + direction[1]) % marks.length; // one after the other
    else if (direction) this.focusAt = this.neighbour(...direction);
    else if (event.key === "Home" || event.key === "End") this.focusAt = event.key === "Home" ? 0 : marks.length - 1;
    else if (event.key === "Enter") this.choose(this.focusAt);
    else return;
    event.preventDefault();
    event.stopPropagation();
    this.refocus();
    this.draw();
  }

  // The nearest mark in a direction; sideways distance counts twice.
  neighbour(dx, dy) {
    const boxes = this.marks().map((m) => this.painter.box(m, this.axes));
    const from = boxes[this.focusAt];
    const middle = (b) => [b.x + b.w / 2, b.y + b.h / 2];
    if (!from) return Math.max(boxes.findIndex(Boolean), 0);
    const [x, y] = middle(from);
    let best = this.focusAt, least = Infinity;
    boxes.forEach((box, i) => {
      if (!box || i === this.focusAt) return;
      const [ax, ay] = [middle(box)[0] - x, middle(box)[1] - y];
      const along = ax * dx + ay * dy, aside = Math.abs(ax * dy) + Math.abs(ay * dx);
      if (along < 1) return;
      const cost = along + 2 * aside;
      if (cost < least) [best, least] = [i, cost];
    });
    return best;
  }

  destroy() {
    clearTimeout(this.speaking);
    clearTimeout(this.replaying);
    this.offers.close();
    this.observer.disconnect();
    this.draw.cancel();
    this.hover.cancel();
    this.axes.destroy();
  }
}
