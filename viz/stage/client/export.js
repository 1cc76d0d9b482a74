// Files: a picture of a view, a whole run in one page, a timeline, a recording; and the player inside such a page.
Object.assign(Share.prototype, {
  url(path, query = {}) {
    const url = new URL(path, this.stage.base);
    url.searchParams.set("viewer", this.stage.link.viewer || "");
    for (const [key, value] of Object.entries(query)) if (value !== null && value !== undefined) url.searchParams.set(key, value);
    return url;
  },

  // The answer to a request; a refusal becomes its sentence on the page, and null.
  async answer(path, query) {
    try {
      const answer = await fetch(this.url(path, query));
      if (answer.ok) return answer;
      this.stage.tellNotice(sentenceOf(await answer.json()), true);
    } catch {
      this.stage.tellNotice(WORDS.offline, true);
    }
    return null;
  },

  // Download what the server makes.
  async fetch(path, query = {}) {
    this.stage.tellNotice(WORDS.share.making, false);
    const answer = await this.answer(path, query);
    if (!answer) return;
    const named = /filename\*=UTF-8''([^;]+)/.exec(answer.headers.get("content-disposition") || "");
    const note = decodeURIComponent(answer.headers.get("x-glass-note") || ""), blob = await answer.blob();
    download(blob, named ? decodeURIComponent(named[1]) : "glass-engine");
    this.stage.tellNotice(`${WORDS.share.saved(numberText(blob.size / 1e6))} ${note}`.trim(), false);
  },

  // PNG (1920 × 1080) or SVG of the panel that was used last.
  async picture(format) {
    const { stage, panel } = this;
    if (!panel || !window.Plotly) return;
    const step = stage.at.step ?? null, name = `glass-${panel.view}${step === null ? "" : `-step-${step}`}.${format}`, view = panel.view;
    const link = await this.address();
    const answer = await this.answer("figure.json", { view, step, link });
    if (!answer) return;
    const figure = await answer.json();
    const size = { width: figure.layout.width, height: figure.layout.height };
    if (format === "png") return download(await (await fetch(await Plotly.toImage(figure, { format, ...size, scale: 1920 / size.width }))).blob(), name);
    const text = await Plotly.toImage(figure, { format, ...size, imageDataOnly: true });
    download(new Blob([described(text, figure.layout.meta.title, figure.layout.meta.summary)], { type: "image/svg+xml" }), name);
  },

  // One page with a range of steps.
  film() {
    const { at } = this.stage;
    if (at.last === null || at.last === undefined) return this.fetch("export");
    const most = 300, from = Math.max(Math.min(at.step - most / 2, at.last - most + 1), at.first);
    const field = (value) => h("input", { class: "glass-number", type: "number", min: String(at.first), max: String(at.last), step: "1", value: String(value) });
    const [first, last] = [field(from), field(Math.min(from + most - 1, at.last))];
    this.dialog(WORDS.share.htmlTitle, [
      h("p", { text: WORDS.share.htmlWhat(most) }),
      h("p", { class: "glass-range" }, h("label", {}, h("span", { text: WORDS.share.first }), first), h("label", {}, h("span", { text: WORDS.share.last }), last)),
    ], () => this.fetch("export", { step: at.step, first: first.value, last: last.value, width: this.stage.root.clientWidth, height: this.stage.root.clientHeight }));
  },
});

function download(blob, name) {
  const anchor = h("a", { href: URL.createObjectURL(blob), download: name });
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(anchor.href), 60000);
}

// An SVG with words for those who do not see it.
function described(text, title, summary) {
  const svg = new DOMParser().parseFromString(text, "image/svg+xml").documentElement;
  const add = (tag, words) => { const element = document.createElementNS(SVG, tag); element.textContent = printable(words || ""); return element; };
  svg.prepend(add("title", title), add("desc", summary));
  svg.setAttribute("role", "img");
  return new XMLSerializer().serializeToString(svg);
}

// What XML cannot hold becomes "?".
const printable = (text) => [...text].map((c) => (/[\t\n\r\u0020-\ud7ff\ue000-\ufffd]|[\ud800-\udbff][\udc00-\udfff]/.test(c) ? c : "?")).join("");

// A run that lies inside the page (viz/stage/export.py): the same messages as a Link's, played by a clock of its own.
class FileLink {
  // `chose(step)`: the step that is shown where not every step is there.
  constructor(file, hello, onmessage, onstate, chose) {
    Object.assign(this, { file: file.header, arrays: file.arrays, onmessage, onstate, chose });
    this.transport = "file";
    this.viewer = null;
    this.bytes = 0;
    this.ids = this.file.steps.map((step) => step[0]);
    this.index = this.nearest(this.file.at);
    Object.assign(this, { playing: false, pace: 2, following: true, waiting: false, seq: 0 });
    this.timer = setTimeout(() => {
      const { title, views, theme } = this.file;
      onstate("open");
      onmessage({ t: "welcome", room: "~file", title, views, theme, default_views: views.map((v) => v.name), offers: [], sentence: "", at: {} }, []);
      this.look(hello(1).state);
    }, 0);
  }

  nearest(step) {
    const found = this.ids.findLastIndex((id) => id <= step);
    return Math.max(found, 0);
  }

  send(message) {
    if (message.t === "drawn") this.waiting = false;
    else if (message.t === "view") this.look(message.state);
    else if (message.t === "command") setTimeout(() => { this.onmessage({ t: "reply", id: message.id, result: this.command(message.name, message.args) }, []); this.show(); }, 0);
  }

  look(state) {
    this.following = state.step === null;
    if (!this.following) {
      const before = this.index;
      this.index = this.nearest(state.step);
      if (this.index === before && state.step === this.ids[before] + 1) this.index = Math.min(before + 1, this.ids.length - 1);
      this.chose(this.ids[this.index]);
    }
    this.show();
  }

  command(name, args) {
    const last = this.ids.length - 1;
    if (name === "play") { if (this.index === last) this.index = 0; this.playing = true; }
    else if (name === "pause") this.playing = false;
    else if (name === "step") { this.playing = false; this.index = Math.min(this.index + (args.n || 1), last); }
    else if (name === "seek") this.index = this.nearest(args.step);
    else if (name === "pace") this.pace = args.value;
    else return { ok: false, code: "recording", sentence: "This is a recording: it can be played, but nothing new can be computed." };
    clearTimeout(this.timer);
    if (this.playing) this.tick();
    return { ok: true };
  }

  tick() {
    this.timer = setTimeout(() => {
      if (!this.waiting && !document.hidden) {
        if (this.index >= this.ids.length - 1) this.playing = false; else this.index++;
        this.show();
      }
      if (this.playing) this.tick();
    }, 1000 / (this.pace || 30));
  }

  show() {
    const { file, ids } = this, [step, caption, chips, panels] = file.steps[this.index];
    const state = this.playing ? "running" : this.index === ids.length - 1 ? "idle" : "paused";
    this.waiting = true;
    this.onmessage({
      t: "frames", seq: ++this.seq, stamp: Date.now(), step, first: ids[0], last: ids.at(-1), following: this.following,
      status: { state, pace: this.pace, live: false, cursor: step, presets: [], recording: {}, hint: "", ...file.status },
      caption: file.texts[caption], chips: file.texts[chips],
      panels: panels.map(([figure, items, group, documents], i) => ({ view: file.views[i].name, figure: file.texts[figure], items: file.texts[items], base: file.groups[group][0], documents: file.texts[documents] })),
      ...(this.seq === 1 ? { timeline: file.timeline } : {}),
    }, this.arrays);
  }

  close() { clearTimeout(this.timer); }
}
