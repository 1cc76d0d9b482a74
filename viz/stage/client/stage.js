// The stage: mounts the bars and panels, keeps the viewer's state, applies messages and asks for redraws.
const STATS_KEPT = 600;
const MOST_SAID = 60000; // the hub takes a few more

class Stage {
  constructor(root, options) {
    this.root = root;
    this.base = new URL(options.base || ".", location.href);
    this.lendGpu = options.lend;
    this.abort = new AbortController();
    this.signal = this.abort.signal;
    this.catalogue = [];
    this.offers = [];
    this.models = new Map();
    this.status = {};
    this.at = { following: true };
    this.waiting = new Map();
    this.begun = performance.now();
    this.starting = 0; // prompts and examples that were sent and not yet answered
    this.commands = 0;
    this.credits = 0;
    this.online = false;
    this.max = null;
    this.tab = 1;
    this.sampling = { max_tokens: 64, temperature: 0 };
    this.stats = { updates: 0, frames: 0, latency: 0, latencies: [], drawMs: [], bytes: 0, transport: "none", reconnects: -1 };
    this.state = plainState();
    this.file = options.file ? decodeMessage(options.file) : null; // a run inside the page
    this.person = personName();
    this.fromUrl();
    this.speak();
    this.root.dataset.theme = this.state.theme;
    this.look = new Look(root);
    this.people = new People(this);
    this.calm = window.matchMedia("(prefers-reduced-motion: reduce)");
    this.frame = onFrame(() => this.drawn());
    this.sized = later(() => this.tell(), 150);
    this.remember = later(() => this.toUrl(), 400);
    this.zoomed = later(() => { this.state.ranges = this.ranges(); this.remember(); }, 200);
    this.build();
    this.fit();
    this.listen();
    this.loadPlotly();
    const told = [(credit) => this.hello(credit), (header, arrays) => this.message(header, arrays), (state) => this.linked(state)];
    this.link = this.file ? new FileLink(this.file, ...told, (step) => { this.state.step = step; }) : new Link(this.base, ...told);
    this.alive = setInterval(() => { if (!root.isConnected) this.destroy(); }, 1000);
    this.inviting = setTimeout(() => this.frame(), INVITE_AFTER + 50);
  }

  // ---- building ----

  build() {
    this.share = new Share(this);
    this.tour = new Chapters(this, this.tour);
    this.header = new Header(this);
    this.prompt = new PromptBar(this);
    this.caption = new Caption();
    this.card = Object.assign(new Card(this), { mine: this.card ? this.card.mine : null });
    this.transport = new Transport(this);
    this.drawer = new Drawer(this);
    this.panels = [new Panel(this, 0), new Panel(this, 1)];
    this.notice = h("div", { class: "glass-notice", role: "status", hidden: true });
    this.noticeText = h("span");
    this.restart = h("button", { type: "button", class: "glass-button glass-text", text: WORDS.restart, hidden: true, onclick: () => { this.dismiss(); this.command("restart"); } });
    this.notice.append(this.noticeText, this.restart, iconButton("close", WORDS.dismiss, () => this.dismiss()));
    this.empty = h("div", { class: "glass-empty", hidden: true });
    this.keysHint = h("div", { class: "glass-click", hidden: true, text: WORDS.keysFor });
    this.stageArea = h("div", { class: "glass-panels" }, ...this.panels.map((p) => p.root), this.empty);
    this.body = h("div", { class: "glass-body" }, this.stageArea, this.drawer.root);
    this.blank = h("div", { class: "glass-blank", hidden: true, "aria-label": WORDS.blank });
    const embed = new URLSearchParams(location.search).get("embed");
    if (embed !== null) {
      this.root.classList.add("glass-embed");
      if (embed) this.state.views = [embed];
    }
    this.root.replaceChildren(this.header.root, this.prompt.root, this.tour.strip, this.body, this.caption.root, this.card.root, this.transport.root, this.notice, this.keysHint, this.share.menu, this.tour.menu, this.blank);
    this.root.classList.toggle("glass-file", Boolean(this.file));
  }

  listen() {
    const on = (target, name, action, extra = {}) => target.addEventListener(name, action, { signal: this.signal, ...extra });
    on(window, "resize", () => this.fit());
    on(document, "keydown", (e) => this.key(e));
    on(document, "visibilitychange", () => { if (!document.hidden) { this.redraw(); if (this.credits) this.frame(); } });
    on(this.calm, "change", () => this.tell());
    on(window, "blur", () => this.focusHint(), {});
    on(window, "focus", () => { this.keysHint.hidden = true; });
    on(this.blank, "pointerdown", () => this.toggleBlank());
    for (const name of ["pointerdown", "focusin"]) on(this.stageArea, name, (e) => { this.share.used = this.panels.find((panel) => panel.root.contains(e.target)); });
    on(this.root, "pointerdown", (e) => { if (!this.share.menu.contains(e.target) && !this.share.button.contains(e.target)) this.share.close(false); });
    on(this.root, "pointerdown", (e) => { if (!this.header.minor.contains(e.target) && !this.header.more.contains(e.target)) this.header.showMore(false); });
    on(this.stageArea, "touchstart", (e) => { this.swipe = e.touches.length === 1 ? [e.touches[0].clientX, e.touches[0].clientY] : null; }, { passive: true });
    on(this.stageArea, "touchend", (e) => this.swiped(e), { passive: true });
    on(window.matchMedia("(prefers-color-scheme: dark)"), "change", (e) => { if (!this.themeChosen) this.setTheme(e.matches ? "dark" : "light", false); });
  }

  focusHint() { if (window.self !== window.top) this.keysHint.hidden = false; }

  // Locally the window decides the height; inside somebody's frame only fixed steps do, or both would grow for ever.
  fit() {
    let height;
    if (this.file) height = this.fitFile(...this.file.header.size);
    else if (window.self === window.top) {
      const top = this.root.getBoundingClientRect().top + window.scrollY;
      height = Math.max(window.innerHeight - Math.min(Math.max(top, 0), 200), 420);
    } else if (this.root.classList.contains("glass-embed")) {
      height = window.innerHeight;
    } else {
      const screen_ = window.screen.availHeight || 800;
      height = screen_ >= 1000 ? 900 : screen_ >= 800 ? 720 : 600;
    }
    this.root.style.setProperty("--glass-height", `${Math.round(height)}px`);
    const width = this.root.clientWidth;
    this.phone = width > 0 && width < 700;
    this.root.classList.toggle("glass-phone", this.phone);
    this.root.classList.toggle("glass-stacked", !this.phone && width < 1000);
    this.header.fit();
    this.arrange();
  }

  // A page in a file keeps the size that its pictures were made for, and grows or shrinks as a whole.
  fitFile(width, height) {
    magnified = Math.min(window.innerWidth / width, window.innerHeight / height);
    const left = (window.innerWidth - width * magnified) / 2, top = (window.innerHeight - height * magnified) / 2;
    Object.assign(this.root.style, { width: `${width}px`, transformOrigin: "0 0", transform: `translate(${left}px, ${top}px) scale(${magnified})` });
    return height;
  }

  loadPlotly() {
    if (window.Plotly) return this.redraw();
    const script = document.createElement("script");
    script.src = new URL(`plotly.min.js?v=${encodeURIComponent(PLOTLY_VERSION)}`, this.base);
    script.onload = () => {
      if (this.signal.aborted) return;
      for (const panel of this.panels) panel.figureSeen = null;
      this.redraw();
    };
    script.onerror = () => this.tellNotice(WORDS.noPlotly, true);
    document.head.append(script);
  }

  // ---- talking to the hub ----

  hello(credit) {
    this.credits = 0;
    this.models.clear();
    const query = new URLSearchParams(location.search);
    const rec = this.state.source === "live" ? "" : this.state.source;
    return { t: "hello", credit, person: this.person, room: this.room || query.get("room") || "", join: query.get("join") || "", rec, chapter: query.get("chapter") || "", ...this.viewMessage() };
  }

  viewMessage() {
    const panels = this.shown().map((p) => p.size()).filter((p) => p.view);
    const { views, ranges, source, ...rest } = this.state; // a zoom is the browser's own
    return { state: views.length ? { ...rest, views } : rest, panels, follow: this.people.follow, max_fps: this.calm.matches ? 1 : 60 };
  }

  tell() {
    if (this.online) this.link.send({ t: "view", ...this.viewMessage() });
  }

  setState(changes) {
    Object.assign(this.state, changes);
    this.people.moved(changes);
    this.tell();
    this.remember();
  }

  command(name, args = {}) {
    return new Promise((done) => {
      if (!this.online) return done({ ok: false, code: "offline" });
      if (JSON.stringify(args).length > MOST_SAID) return done({ ok: false, code: "too_long" });
      const id = ++this.commands;
      if (["prompt", "preset"].includes(name)) this.starting++;
      this.waiting.set(id, done);
      setTimeout(() => { if (this.waiting.delete(id)) done({ ok: false, code: "offline" }); }, 30000);
      this.link.send({ t: "command", id, name, args });
    }).then((reply) => {
      if (["prompt", "preset"].includes(name)) this.starting = Math.max(this.starting - 1, 0);
      if (!reply.ok) this.tellNotice((reply.sentence = sentenceOf(reply)), true);
      else if (reply.sentence) this.tellNotice(sentenceOf(reply), false);
      if (reply.burst || reply.later) this.asksForGpu = true;
      return reply;
    });
  }

  async preset(name) {
    this.setState({ step: null, source: "live" });
    const reply = await this.command("preset", { name });
    if (reply.ok && reply.point) this.tellNotice(named(`preset.${name}.point`, reply.point), false);
  }

  linked(state) {
    this.online = state === "open";
    if (this.online) this.stats.reconnects++;
    this.header.show(this.status);
    for (const [id, done] of this.waiting) if (!this.online) { this.waiting.delete(id); done({ ok: false, code: "offline" }); }
  }

  message(header, arrays) {
    if (header.t === "welcome") this.welcome(header);
    else if (header.t === "reply") {
      const done = this.waiting.get(header.id);
      this.waiting.delete(header.id);
      if (done) done(header.result);
    } else if (header.t === "error") this.tellNotice(sentenceOf(header), true);
    else if (header.t === "frames") this.frames(header, arrays);
    else if (header.t === "moved") this.moved(header);
  }

  // The server took this tab to another room: what it showed is gone, what it shows begins there.
  moved(header) {
    this.cameTo(header.room);
    this.models.clear();
    this.at = { following: true };
    this.people.follow = true;
    Object.assign(this.state, { step: null, selection: null, source: "live" });
    if (header.sentence) this.tellNotice(sentenceOf(header.problem && header.problem.code ? header.problem : header), false);
    this.remember();
    this.redraw();
  }

  cameTo(room) {
    this.room = room.startsWith("~") ? "" : room;
    this.intro = room.startsWith("~");
  }

  welcome(header) {
    this.views = header.views;
    this.nameViews();
    this.look.maps = header.theme.maps;
    this.look.luts.clear();
    setText(this.header.title, header.title);
    this.cameTo(header.room);
    this.offers = header.offers || [];
    if (!this.arrived) this.landed(header.at || {});
    if (header.sentence) this.tellNotice(sentenceOf(header.problem && header.problem.code ? header.problem : header), false);
    const known = new Set(this.catalogue.map((v) => v.name));
    const wanted = this.state.views.filter((v) => known.has(v));
    this.state.views = wanted.length ? wanted : header.default_views;
    this.arrange();
    this.arrived = true;
    this.tell();
  }

  // What the address did not say, the link's maker did. A link that has expired leads to its chapter.
  landed(at) {
    const asked = stateFromQuery(new URLSearchParams(location.search));
    for (const { field } of VIEW_KEYS) if (at[field] !== undefined && asked[field] === undefined && !["theme", "language"].includes(field)) this.state[field] = at[field];
    if (!at.expired) return;
    Object.assign(this.state, { source: "live", step: null, selection: null, ranges: [] });
    if (at.chapter && this.offers.includes("chapter")) this.command("chapter", { name: at.chapter });
  }

  // ---- frames ----

  frames(header, arrays) {
    this.stats.frames++;
    this.credits++;
    this.stamp = header.stamp;
    this.at = { step: header.step, first: header.first, last: header.last, following: header.following };
    if (header.status) this.status = header.status;
    if (header.chips) this.chipRow = header.chips;
    if (header.people !== undefined) this.people.take(header.people);
    if (header.why) this.why = header.why;
    this.tour.take(header);
    if (header.caption !== undefined) this.sentence = header.caption;
    if (header.timeline) this.transport.scrubber.take(header.timeline, arrays[header.timeline.base].data, arrays[header.timeline.base + 1].data);
    for (const entry of header.panels || []) this.takePanel(entry, arrays);
    if (header.fault) this.tellNotice(header.fault, true);
    this.frame();
  }

  takePanel(entry, arrays) {
    const model = this.models.get(entry.view) || { rasters: [], series: [] };
    if (!entry.figure && !model.figure) return; // was on its way when this tab moved, and changes a picture that is gone
    this.models.set(entry.view, model);
    if (entry.figure) model.figure = entry.figure;
    if (entry.items) model.items = entry.items;
    if (entry.documents) model.documents = entry.documents;
    if (entry.base !== undefined && model.figure) {
      let at = entry.base;
      model.rasters = model.figure.rasters.map(() => arrays[at++]);
      model.series = model.figure.series.map((s) => ({ x: arrays[at++].data, y: arrays[at++].data, base: s.base ? arrays[at++].data : null }));
    }
    model.changed = true;
  }

  // On an animation frame: draw what is newest, then give the credits back.
  drawn() {
    const begun = performance.now();
    this.showBars();
    for (const panel of this.shown()) {
      const model = this.models.get(panel.view);
      if (!model || !model.changed) { panel.beside(); continue; }
      model.changed = false;
      panel.update();
      panel.draw.cancel();
      panel.paint();
    }
    const { stats } = this;
    if (this.credits) {
      stats.updates++;
      stats.latency = Date.now() - this.stamp;
      keep(stats.latencies, stats.latency);
      keep(stats.drawMs, performance.now() - begun);
    }
    stats.bytes = this.link.bytes;
    stats.transport = this.link.transport;
    for (; this.credits > 0; this.credits--) this.link.send({ t: "drawn" });
  }

  showBars() {
    const { status, at } = this;
    const free = status.state === "running" && (status.pace === null || status.pace === undefined || status.pace > 4);
    this.header.show(status);
    if (this.chipRow) this.prompt.show(this.chipRow);
    this.prompt.hint(phrase(status.hint || WORDS.prompt, "said"));
    this.prompt.showInvite(status);
    if (this.sentence !== undefined) this.caption.show(this.tour.sentence() ?? this.sentence, free);
    this.transport.show(status, at);
    this.people.grey();
    this.drawer.show(status, this.chipRow);
    this.showSelected();
    this.card.show(this.chipRow, this.why);
    this.lend(status.burst);
    this.showFault(status.error);
    this.showEmpty();
  }

  showSelected() {
    const id = this.state.selection;
    if (this.drawer.root.hidden || !id) return;
    this.drawer.explain(this.why && this.why.of === id ? this.why.lines : []);
    for (const panel of this.shown()) {
      const mark = panel.marks().find((m) => m[0] === id);
      if (mark) return this.drawer.select(mark[5], mark[7]);
    }
    const chip = this.chipRow && this.chipRow.items.find((c) => c.id === id);
    if (chip) this.drawer.select(`${chip.name}: ${WORDS.state[chip.state]}, ${WORDS.tokens(chip.tokens)}`, chip.prompt);
  }

  // Where a GPU is lent for each burst, Gradio says who asks: an event of its own, from the page whose prompt waits.
  lend(burst) {
    if (this.asksForGpu && burst === "wanted" && this.lendGpu) this.lendGpu();
    if (burst === "wanted" || (burst === "idle" && this.burstWas === "running")) this.asksForGpu = false;
    this.burstWas = burst;
  }

  showFault(error) {
    const text = error ? sentenceOf(error) || String(error.code || "") : "";
    if (text === this.faultShown) return;
    this.faultShown = text;
    if (text) this.tellNotice(text, true, this.status.state === "dead" && this.status.live);
    else if (this.noticeIsFault) this.dismiss();
    this.noticeIsFault = Boolean(text);
  }

  // Never an empty panel: a sentence and something to press.
  showEmpty() {
    const nothing = this.at.last === null || this.at.last === undefined;
    const presets = this.status.presets || [];
    const queued = (this.status.queued || []).length > 0, paused = queued && this.status.state === "paused";
    const going = this.tour.told && this.tour.told.phase === "going";
    const begins = !paused && (this.starting > 0 || queued || going || this.status.state === "running");
    const key = nothing ? JSON.stringify([this.status.state, presets, begins, paused]) : "";
    if (key === this.emptyShown) return;
    this.emptyShown = key;
    this.empty.hidden = !nothing;
    if (!nothing) return;
    const text = this.status.state === "loading" ? WORDS.loading : begins ? WORDS.emptyBegins : paused ? WORDS.emptyPaused : presets.length ? WORDS.empty : WORDS.emptyPlain;
    const buttons = begins || paused ? [] : presets.slice(0, 6).map((p) => h("button", { type: "button", class: "glass-button glass-text glass-big", text: named(`preset.${p.name}.title`, p.title || p.name), onclick: () => this.preset(p.name) }));
    this.empty.replaceChildren(h("p", { text }), h("div", {}, ...buttons));
  }

  tellNotice(text, isError, canRestart = false) {
    this.restart.hidden = !canRestart;
    setText(this.noticeText, short(String(text), 600));
    this.notice.classList.toggle("glass-bad", Boolean(isError));
    this.notice.hidden = false;
    this.noticeIsFault = false;
    clearTimeout(this.noticeTimer);
    if (!isError) this.noticeTimer = setTimeout(() => this.dismiss(), 6000);
  }

  dismiss() { this.notice.hidden = true; }

  // Before anything is typed: the recording that ships plays, and no link asked for another one.
  get isIntro() { return Boolean(this.status.intro) && ["", "live"].includes(this.state.source || ""); }

  // ---- panels ----

  shown() { return (this.panels || []).filter((p) => !p.root.hidden && p.view); }

  // Which views are on screen: the main one, one companion (a third is its tab), or one maximised.
  arrange() {
    if (!this.catalogue.length) return;
    const { views } = this.state;
    this.tab = clamp(this.tab, 1, Math.max(views.length - 1, 1));
    const single = this.phone || this.root.classList.contains("glass-embed");
    if (single && this.max === null) this.max = 0;
    if (!single && this.max !== null && this.wasSingle) this.max = null;
    this.wasSingle = single;
    const max = this.max !== null && views[this.max] ? this.max : null;
    const [main, companion] = this.panels;
    main.root.hidden = max !== null && max > 0;
    companion.root.hidden = max === null ? views.length < 2 : max === 0;
    if (max !== null && max > 0) this.tab = max;
    if (views[0]) main.show(views[0], this.catalogue);
    if (views[this.tab]) companion.show(views[this.tab], this.catalogue);
    this.stageArea.classList.toggle("glass-one", this.shown().length < 2);
    this.showTabs(companion, views);
    this.showTabs(main, views);
    for (const panel of this.panels) setIcon(panel.maxButton, max === null ? "max" : "min", max === null ? WORDS.maximise : WORDS.restore);
    this.redraw();
    this.sized();
  }

  // Beside a main panel the companion has a tab for each of the others; a phone shows one panel, with a tab for each.
  showTabs(panel, views) {
    const first = this.phone ? 0 : 1, many = this.phone ? views.length > 1 : panel.index === 1 && views.length > 2;
    panel.tabs.hidden = !many;
    if (!many) return;
    const chosen = this.max ?? this.tab, turn = (slot) => { if (this.max !== null) this.max = slot; else this.tab = slot; this.arrange(); this.tell(); };
    panel.tabs.replaceChildren(...views.slice(first).map((name, i) => {
      const view = this.catalogue.find((v) => v.name === name), slot = first + i;
      return h("button", { type: "button", role: "tab", class: "glass-tab", "aria-selected": String(chosen === slot), "aria-label": view ? view.title : name, title: view ? view.title : name, text: String(slot + 1), onclick: () => turn(slot) });
    }));
  }

  setView(panel, name) {
    const views = this.state.views.slice();
    const slot = panel.index === 0 ? 0 : this.tab;
    const other = views.indexOf(name);
    if (other >= 0 && other !== slot) views[other] = views[slot];
    views[slot] = name;
    this.setState({ views });
    this.arrange();
  }

  toggleMax(panel) {
    const slot = panel.index === 0 ? 0 : this.tab;
    this.max = this.max === null ? slot : null;
    this.arrange();
  }

  swiped(event) {
    if (!this.swipe || !this.phone) return;
    const [dx, dy] = [event.changedTouches[0].clientX - this.swipe[0], event.changedTouches[0].clientY - this.swipe[1]];
    if (Math.abs(dx) < 60 || Math.abs(dy) > 60) return;
    const count = this.state.views.length;
    this.max = clamp((this.max || 0) - Math.sign(dx), 0, count - 1);
    this.arrange();
  }

  redraw() {
    for (const panel of this.shown()) { if (panel.model) panel.update(); panel.draw(); }
    if (this.transport) this.transport.scrubber.draw();
  }

  // ---- choosing, moving ----

  select(id, mark = null) {
    this.setState({ selection: id });
    if (!id) this.drawer.select("", "");
    else if (mark) this.drawer.select(mark[5], mark[7]);
    if (this.chipRow) this.prompt.show(this.chipRow);
    if (id && this.isHeldUp(id) && !this.phone && !this.root.classList.contains("glass-embed")) this.toggleDrawer(true);
    this.showSelected();
    this.card.show(this.chipRow, this.why);
    this.redraw();
  }

  // Somebody who waits or lost its blocks is asked "why?": a phone's card says it, otherwise the inspector.
  isHeldUp(id) {
    const chip = this.chipRow && this.chipRow.items.find((item) => item.id === requestOf(id));
    return Boolean(chip && ["waiting", "preempted"].includes(chip.state));
  }

  // What runs here, from the header's word for it.
  showSource() {
    this.toggleDrawer(true);
    this.drawer.sourcePart.scrollIntoView({ block: "nearest" });
  }

  inspect(text, detail) {
    this.toggleDrawer(true);
    this.state.selection = null;
    this.drawer.select(text, detail);
  }

  playPause() {
    if (this.status.state === "running" && this.at.following) return this.command("pause");
    this.resume();
    this.command("play");
  }

  // Someone who scrubbed and goes on: a recording continues from here, a live engine from its live edge.
  resume() {
    if (this.at.following) return;
    if (this.status.live === false) this.command("seek", { step: this.state.step });
    this.setState({ step: null });
  }

  forward() {
    if (this.at.following || this.state.step === null) return this.command("step", { n: 1 });
    this.seek(this.state.step + 1);
  }

  back() {
    const from = this.state.step ?? this.at.step;
    if (from !== null && from !== undefined) this.seek(from - 1);
  }

  seek(step) {
    if (this.at.last === null || this.at.last === undefined) return;
    if (this.status.live !== false && step > this.at.last) return this.goLive();
    this.setState({ step: clamp(step, this.at.first, this.at.last) });
  }

  goLive() { this.setState({ step: null }); }

  // ---- keys ----

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (document.querySelector("dialog[open]") || !this.root.isConnected) return;
    const target = event.target;
    const inside = this.root.contains(target) || target === document.body || target === document.documentElement;
    if (!inside) return;
    const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName) || target.isContentEditable;
    if (event.key === "Escape") {
      if (!this.notice.hidden) this.dismiss();
      if (typing || target !== document.body) target.blur();
      return;
    }
    if (event.key === "PageUp" || event.key === "PageDown") { // a clicker works wherever the focus was left
      event.preventDefault();
      return this.tour.by(event.key === "PageUp" ? -1 : 1);
    }
    if (typing) return;
    const button = target.tagName === "BUTTON";
    const actions = {
      " ": () => this.playPause(), ArrowRight: () => this.forward(), ArrowLeft: () => this.back(),
      Home: () => this.seek(this.at.first), End: () => this.goLive(), f: () => this.people.followAgain() || this.goLive(),
      i: () => this.toggleDrawer(), l: () => this.offers.includes("link") && this.share.copy(), e: () => this.file || this.share.toggle(), p: () => this.toggleProjector(), b: () => this.toggleBlank(), "?": () => this.help(),
      1: () => this.maximise(0), 2: () => this.maximise(1), 3: () => this.maximise(2),
    };
    const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!action || (button && event.key === " ")) return;
    event.preventDefault();
    action();
  }

  maximise(slot) {
    if (!this.state.views[slot]) return;
    this.max = this.max === slot ? null : slot;
    this.arrange();
  }

  toggleBlank() {
    this.blank.hidden = !this.blank.hidden;
  }

  toggleDrawer(open = this.drawer.root.hidden) {
    this.drawer.root.hidden = !open;
    this.header.drawer.setAttribute("aria-expanded", String(open));
    if (open) { this.drawer.show(this.status, this.chipRow); this.showSelected(); }
  }

  // ---- language ----

  speak() {
    this.state.language = speak(this.state.language);
    this.root.lang = document.documentElement.lang = spoken;
  }

  nameViews() {
    this.catalogue = this.views.map((v) => ({ ...v, title: named(`${v.name}.title`, v.title), question: named(`${v.name}.question`, v.question) }));
  }

  // Everything with words in it is built anew; what was typed and chosen stays.
  setLanguage(language) {
    stored.set("language", language);
    this.ownLanguage = this.state.language = language;
    this.speak();
    const { drawer, prompt, transport, header } = this, focused = header.root.contains(document.activeElement);
    for (const panel of this.panels) panel.destroy();
    transport.scrubber.destroy();
    this.caption.destroy();
    this.abort.abort();
    this.abort = new AbortController();
    this.signal = this.abort.signal;
    this.build();
    this.listen();
    this.prompt.input.value = prompt.input.value;
    for (const [name, input] of Object.entries(this.drawer.fields)) Object.assign(input, { value: drawer.fields[name].value, checked: drawer.fields[name].checked });
    this.drawer.root.hidden = drawer.root.hidden;
    this.header.drawer.setAttribute("aria-expanded", String(!drawer.root.hidden));
    this.transport.scrubber.bins = transport.scrubber.bins;
    setText(this.header.title, header.title.textContent);
    this.emptyShown = this.faultShown = undefined;
    if (this.views) this.nameViews();
    this.fit();
    this.showBars();
    this.setState({ language });
    if (focused) (this.header.language.offsetParent ? this.header.language : this.header.more).focus();
  }

  toggleTheme() { this.setTheme(this.root.dataset.theme === "dark" ? "light" : "dark"); }
  toggleProjector() { this.setTheme(this.root.dataset.theme === "projector" ? "light" : "projector"); }

  setTheme(theme, keep_ = true) {
    this.root.dataset.theme = theme;
    if (keep_) { this.themeChosen = true; stored.set("theme", theme); }
    this.look.read();
    this.header.fit();
    for (const panel of this.panels) panel.restyle();
    this.transport.scrubber.draw();
    this.setState({ theme });
  }

  help() {
    const dialog = h("dialog", { class: "glass-dialog glass-keys", "aria-label": WORDS.help, onclose: () => dialog.remove() },
      h("h2", { text: WORDS.help }),
      h("dl", {}, ...Object.values(WORDS.keys).map((line) => line.split("\t")).flatMap(([keys, what]) => [h("dt", { text: keys }), h("dd", { text: what })])),
      h("form", { method: "dialog" }, h("button", { class: "glass-button glass-primary", text: WORDS.close })));
    this.root.append(dialog);
    dialog.showModal();
    dialog.scrollTop = 0;
  }

  // ---- recordings and links ----

  saveRecording() {
    return this.share.fetch("recording");
  }

  async openRecording(input) {
    const file = input.files && input.files[0];
    input.value = "";
    if (!file) return;
    const url = new URL("recording", this.base);
    url.searchParams.set("viewer", this.link.viewer || "");
    url.searchParams.set("name", file.name);
    try {
      const reply = await (await fetch(url, { method: "POST", body: file })).json();
      if (reply.ok) this.setState({ source: "live" });
      if (!reply.ok || reply.sentence) this.tellNotice(sentenceOf(reply), !reply.ok);
    } catch {
      this.tellNotice(WORDS.offline, true);
    }
  }

  fromUrl() {
    const query = new URLSearchParams(location.search);
    const wish = stored.get("theme") || (window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    this.state.theme = ["light", "dark", "projector"].includes(query.get("theme")) ? query.get("theme") : wish;
    this.themeChosen = Boolean(stored.get("theme")) || this.state.theme === "projector"; // otherwise it follows the system's
    for (const [field, value] of Object.entries(stateFromQuery(query))) if (field !== "theme" && field !== "language") this.state[field] = value;
    const asked = query.get("lang") || query.get("language") || "";
    this.ownLanguage = ours([stored.get("language") || "", ...navigator.languages]) || "en";
    this.state.language = ours([asked]) || this.ownLanguage;
  }

  // The zoom of the panels, four numbers each (viz/view.py).
  ranges() {
    const seen = this.shown().map((panel) => panel.axes.seen);
    return seen.some(Boolean) ? seen.flatMap((four) => four || [0, 0, 0, 0]) : [];
  }

  toUrl() {
    const url = new URL(location.href);
    if (this.room && this.room !== "main") url.searchParams.set("room", this.room);
    else url.searchParams.delete("room");
    this.people.toUrl(url);
    url.searchParams.delete("lang");
    stateToQuery(this.state, url.searchParams, { ...plainState(), language: this.ownLanguage });
    try { history.replaceState(history.state, "", url); } catch { /* a sandboxed frame */ }
  }

  destroy() {
    clearInterval(this.alive);
    clearTimeout(this.inviting);
    clearTimeout(this.noticeTimer);
    this.abort.abort();
    this.link.close();
    this.frame.cancel();
    this.sized.cancel();
    this.remember.cancel();
    this.zoomed.cancel();
    this.caption.destroy();
    this.transport.scrubber.destroy();
    for (const panel of this.panels) panel.destroy();
    this.root.replaceChildren();
    delete this.root.glassStage;
    if (window.glass && window.glass.stage === this) delete window.glass;
  }
}

// This tab's secret name: a reload keeps it, so that its requests and rights stay its own. A duplicated tab gets a copy.
function personName() {
  try {
    const known = sessionStorage.getItem("glass-person");
    if (known) return known;
    const made = Array.from(crypto.getRandomValues(new Uint8Array(18)), (b) => b.toString(16).padStart(2, "0")).join("");
    sessionStorage.setItem("glass-person", made);
    return made;
  } catch { return ""; }
}

function keep(list, value) {
  list.push(value);
  if (list.length > STATS_KEPT) list.shift();
}

window.glassMount = (element, options = {}) => {
  if (element.glassStage) return element.glassStage;
  const stage = new Stage(element, options);
  element.glassStage = stage;
  window.glass = { stage, stats: stage.stats, state: stage.state, send: (name, args) => stage.command(name, args), say: sentenceOf };
  return stage;
};
