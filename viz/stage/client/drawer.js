// The inspector: what is selected, the requests, the next prompt's sampling, the knobs.
class Drawer {
  constructor(stage) {
    this.stage = stage;
    this.what = h("p", { class: "glass-what", text: WORDS.nothing });
    this.detail = h("p", { class: "glass-detail", hidden: true });
    this.clear = h("button", { type: "button", class: "glass-button glass-text", text: WORDS.clear, hidden: true, onclick: () => stage.select(null) });
    this.requests = h("ul", { class: "glass-requests" });
    this.knobs = h("div", { class: "glass-knobs" });
    this.tokens = h("input", { type: "number", min: "1", max: "4096", step: "1", value: "64", class: "glass-number", onchange: () => this.sample() });
    this.heat = h("input", { type: "number", min: "0", max: "2", step: "0.1", value: "0", class: "glass-number", onchange: () => this.sample() });
    const part = (title, ...inside) => h("section", {}, h("h2", { text: title }), ...inside);
    this.knobPart = part(WORDS.knobs, this.knobs);
    this.root = h("aside", { class: "glass-drawer", hidden: true, "aria-label": WORDS.inspector, tabIndex: 0 },
      part(WORDS.selected, this.what, this.detail, this.clear),
      part(WORDS.requests, this.requests),
      part(WORDS.newPrompt, h("label", {}, h("span", { text: WORDS.maxTokens }), this.tokens), h("label", {}, h("span", { text: WORDS.temperature }), this.heat)),
      this.knobPart);
    this.rows = new Map();
  }

  sample() {
    const tokens = Math.round(Number(this.tokens.value));
    const heat = Number(this.heat.value);
    if (tokens >= 1) this.stage.sampling.max_tokens = tokens;
    if (heat >= 0) this.stage.sampling.temperature = heat;
  }

  select(text, detail) {
    setText(this.what, text || WORDS.nothing);
    setText(this.detail, detail || "");
    this.detail.hidden = !detail;
    this.clear.hidden = !text;
  }

  show(status, row) {
    if (this.root.hidden) return;
    this.showRequests(row ? row.items : []);
    this.showKnobs(status.knobs || {});
  }

  showRequests(items) {
    const live = new Set(items.map((i) => i.id));
    for (const [id, made] of this.rows) if (!live.has(id)) { made.root.remove(); this.rows.delete(id); }
    for (const item of items) {
      let made = this.rows.get(item.id);
      if (!made) {
        made = { name: h("button", { type: "button", class: "glass-name", onclick: () => this.stage.select(item.id) }), state: h("span", { class: "glass-state" }) };
        made.stop = h("button", { type: "button", class: "glass-button glass-text", text: WORDS.abort, "aria-label": WORDS.abortOf(item.name), onclick: () => this.stage.command("abort", { request_id: item.request, id: item.id }) });
        made.root = h("li", {}, made.name, made.state, made.stop);
        this.rows.set(item.id, made);
        this.requests.append(made.root);
      }
      setText(made.name, item.name);
      identity(made.name, item.slot);
      const why = WORDS.why[item.why];
      setText(made.state, `${WORDS.state[item.state]}${why ? ": " + why : ""}, ${WORDS.tokens(item.tokens)}`);
      made.stop.hidden = item.state === "finished";
    }
    if (!items.length && !this.requests.childElementCount) this.requests.append((this.none = h("li", { text: WORDS.noRequests })));
    else if (items.length && this.none) { this.none.remove(); this.none = null; }
  }

  // Knobs are rebuilt only when they differ, and never under a hand that is turning one.
  showKnobs(knobs) {
    const text = JSON.stringify(knobs);
    if (text === this.shown || this.knobs.contains(document.activeElement)) return;
    this.shown = text;
    this.knobPart.hidden = !Object.keys(knobs).length;
    this.knobs.replaceChildren(...Object.entries(knobs).map(([name, knob]) => this.knob(name, knob)));
  }

  knob(name, knob) {
    const send = (value) => this.stage.command("knob", { name, value });
    const off = Boolean(knob.why);
    let control;
    if (knob.choices) {
      control = h("select", { class: "glass-select", disabled: off, onchange: () => { send(knob.choices[control.selectedIndex]); control.blur(); } },
        ...knob.choices.map((c) => h("option", { text: c === true ? WORDS.on : c === false ? WORDS.off : String(c), selected: c === knob.value })));
    } else if (typeof knob.value === "boolean") {
      control = h("input", { type: "checkbox", checked: knob.value, disabled: off, onchange: () => { send(control.checked); control.blur(); } });
    } else {
      control = h("input", { type: "number", class: "glass-number", disabled: off, value: String(knob.value), min: String(knob.min ?? ""), max: String(knob.max ?? ""), step: String(knob.step ?? (Number.isInteger(knob.value) ? 1 : "any")),
        onchange: () => { const value = Number(control.value); if (control.value !== "" && Number.isFinite(value)) send(clamp(value, knob.min ?? -Infinity, knob.max ?? Infinity)); } });
    }
    const note = off ? knob.why : knob.note || WORDS.cost[knob.cost] || "";
    return h("label", { class: off ? "glass-off" : null }, h("span", { text: (knob.label || name).replace(/_/g, " ") }), control, h("small", { text: note }));
  }
}
