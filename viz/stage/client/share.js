// What an address says about where somebody looks (VIEW_KEYS, from ViewState), copied links, and the share menu.
const NUMBER = /^-?[0-9]{1,16}(\.[0-9]{1,20})?(e[+-]?[0-9]{1,2})?$/;
const READ = {
  text: (text, key) => (text && (!key.choices.length || key.choices.includes(text)) ? text.slice(0, 200) : null),
  whole: (text) => (/^[0-9]{1,9}$/.test(text) ? Number(text) : null),
  names: (text) => { const names = text.split(",").slice(0, 3).filter(Boolean); return names.length ? names : null; },
  numbers: (text) => { const parts = text.split(",").slice(0, 8); return parts.every((part) => NUMBER.test(part)) ? parts.map(Number) : null; },
};

const plainState = () => Object.fromEntries(VIEW_KEYS.map((key) => [key.field, structuredClone(key.otherwise)]));

// The fields that a query names and that can be read; ViewState.from_query does the same.
function stateFromQuery(query) {
  const state = {};
  for (const key of VIEW_KEYS) {
    const value = query.has(key.key) ? READ[key.kind](query.get(key.key), key) : null;
    if (value !== null) state[key.field] = value;
  }
  return state;
}

// Write a state into a query; what is as in `plain` is left out. ViewState.to_query does the same.
function stateToQuery(state, query, plain = plainState()) {
  for (const key of VIEW_KEYS) {
    const value = state[key.field];
    if (value === null || value === undefined || String(value) === String(plain[key.field])) query.delete(key.key);
    else query.set(key.key, String(value));
  }
  return query;
}

class Share extends Menu {
  static fromQuery = stateFromQuery;
  static toQuery = stateToQuery;

  constructor(stage) {
    super();
    this.stage = stage;
    this.items = {
      link: [WORDS.share.link, () => this.copy()], png: [WORDS.share.png, () => this.picture("png")], svg: [WORDS.share.svg, () => this.picture("svg")],
      html: [WORDS.share.html, () => this.film()], recording: [WORDS.save, () => stage.saveRecording()], trace: [WORDS.share.trace, () => this.fetch("trace.json")],
    };
    this.button = iconButton("share", `${WORDS.share.title} (E)`, () => this.toggle(), { class: "glass-button glass-online", "aria-haspopup": "menu", "aria-expanded": "false" });
    this.menu = h("div", { class: "glass-menu", role: "menu", "aria-label": WORDS.share.title, hidden: true, onkeydown: (e) => this.key(e), onfocusout: (e) => { if (!this.menu.contains(e.relatedTarget) && e.relatedTarget !== this.button) this.close(false); } },
      ...Object.entries(this.items).map(([name, [text, act]]) => h("button", { type: "button", role: "menuitem", class: "glass-item", tabIndex: -1, text, "data-name": name, onclick: () => { this.close(); act(); } })));
  }

  // The panel that was used last, else the first.
  get panel() {
    const shown = this.stage.shown();
    return shown.includes(this.used) ? this.used : shown[0];
  }

  // ---- menu ----

  open() {
    const { stage } = this, offers = stage.offers || [];
    const offered = { link: offers.includes("link"), png: true, svg: true, html: true, recording: (stage.status.recording || {}).save, trace: offers.includes("trace") };
    for (const item of this.menu.children) item.hidden = !offered[item.dataset.name];
    this.menu.hidden = false;
    this.menu.style.right = `${Math.max(stage.root.clientWidth - this.button.offsetLeft - this.button.offsetWidth, 8)}px`;
    this.button.setAttribute("aria-expanded", "true");
    [...this.menu.children].find((item) => !item.hidden).focus();
  }

  // ---- links ----

  // The state as a link says it: the panels that are seen, in their order, at the step that is seen.
  state() {
    const { stage } = this, shown = stage.shown().map((panel) => panel.view);
    const views = stage.max === null ? [...shown, ...stage.state.views.filter((view) => !shown.includes(view))] : shown;
    return { ...stage.state, views, step: stage.at.step ?? null, ranges: stage.ranges() };
  }

  // An address that shows this moment: a live step is pinned first. Empty where that was refused (a notice says why).
  async address() {
    const { stage } = this, state = this.state(), pinned = state.step !== null && (stage.offers || []).includes("link");
    if (pinned) {
      const { source, ranges, ...seen } = state;
      const reply = await stage.command("pin", { step: state.step, state: seen });
      if (!reply.ok) return "";
      Object.assign(state, { source: reply.rec, step: reply.step });
    }
    const url = new URL(location.pathname, location.href);
    stateToQuery(state, url.searchParams, { ...plainState(), theme: "", language: "" });
    return url.href.replaceAll("%2C", ",").replaceAll("%3A", ":");
  }

  async copy() {
    const address = await this.address();
    if (!address) return "";
    try {
      await navigator.clipboard.writeText(address);
      this.stage.tellNotice(WORDS.share.copied, false);
    } catch {
      this.show(address);
    }
    return address;
  }

  // Where the clipboard is closed to us: the text, selected.
  show(address) {
    const text = h("input", { class: "glass-input", type: "text", readOnly: true, value: address, "aria-label": WORDS.share.link });
    this.dialog(WORDS.share.byHand, [text]);
    text.select();
  }

  dialog(title, inside, act = null) {
    const dialog = h("dialog", { class: "glass-dialog glass-share", "aria-label": title, onclose: () => { if (act && dialog.returnValue === "yes") act(); dialog.remove(); } },
      h("h2", { text: title }), ...inside,
      h("form", { method: "dialog" }, act ? h("button", { class: "glass-button glass-primary", value: "yes", text: WORDS.share.make }) : null, h("button", { class: act ? "glass-button glass-text" : "glass-button glass-primary", value: "", text: WORDS.close })));
    this.stage.root.append(dialog);
    dialog.showModal();
    return dialog;
  }
}
