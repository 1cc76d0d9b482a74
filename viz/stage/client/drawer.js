// The inspector: what is selected, the requests, the next prompt's sampling, the knobs.
class Drawer {
  constructor(stage) {
    this.stage = stage;
    this.what = h("p", { class: "glass-what", text: WORDS.nothing });
    this.why = h("p", { class: "glass-why", hidden: true });
    this.detail = h("p", { class: "glass-detail", hidden: true });
    this.clear = h("button", { type: "button", class: "glass-button glass-text", text: WORDS.clear, hidden: true, onclick: () => stage.select(null) });
    this.requests = h("ul", { class: "glass-requests" });
    this.knobs = h("div", { class: "glass-knobs" });
    const field = (type, extra) => h("input", { type, class: "glass-number", autocomplete: "off", onchange: () => this.sample(), ...extra });
    const number = (min, max, step, value = "") => field("number", { min, max, step, value });
    this.fields = {
      max_tokens: number("1", "4096", "1", "64"), temperature: number("0", "2", "0.1", "0"),
      top_k: number("1", null, "1"), top_p: number("0", "1", "0.05"), seed: number("0", null, "1"), n: number("1", "64", "1", "1"),
      stop: field("text", { maxlength: "100", spellcheck: false }), chat: field("checkbox", { class: null, checked: true }),
    };
    const labels = Object.entries(this.fields).map(([name, input]) => h("label", {}, h("span", { text: WORDS.sampling[name] }), input));
    const part = (title, ...inside) => h("section", {}, h("h2", { text: title }), ...inside);
    this.knobPart = part(WORDS.knobs, this.knobs);
    this.source = h("p", { class: "glass-detail" });
    this.sourcePart = part(WORDS.sourceOf, this.source);
    this.root = h("aside", { class: "glass-drawer", hidden: true, "aria-label": WORDS.inspector, tabIndex: 0 },
      part(WORDS.selected, this.what, this.why, this.detail, this.clear),
      part(WORDS.requests, this.requests),
      part(WORDS.newPrompt, ...labels.slice(0, 2), h("details", {}, h("summary", { text: WORDS.moreSampling }), ...labels.slice(2))),
      this.knobPart,
      new Calculator(stage).root,
      this.sourcePart);
    this.rows = new Map();
  }

  // What is typed goes along with the next prompt; the engine checks it and says what is wrong. An empty field says nothing.
  sample() {
    const sampling = {};
    for (const [name, input] of Object.entries(this.fields)) {
      if (input.type === "checkbox") sampling[name] = input.checked;
      else if (input.value !== "") sampling[name] = input.type === "number" ? Number(input.value) : input.value;
    }
    this.stage.sampling = sampling;
  }

  select(text, detail) {
    setText(this.what, text || WORDS.nothing);
    setText(this.detail, detail || "");
    this.detail.hidden = !detail;
    this.clear.hidden = !text;
    if (!text) this.explain([]);
  }

  // Why the selected request is where it is, at the step shown: sentences of viz/words/why.py.
  explain(lines) {
    setText(this.why, lines.join("\n"));
    this.why.hidden = !lines.length;
  }

  show(status, row) {
    if (this.root.hidden) return;
    this.showRequests(row ? row.items : []);
    this.showKnobs(this.stage.people.knobs(status.knobs || {}));
    const said = [status.device, phrase(status.badge || "", "said")].filter(Boolean).join(": ");
    setText(this.source, said);
    this.sourcePart.hidden = !said;
  }

  showRequests(items) {
    const live = new Set(items.map((i) => i.id));
    for (const [id, made] of this.rows) if (!live.has(id)) { made.root.remove(); this.rows.delete(id); }
    for (const item of items) {
      let made = this.rows.get(item.id);
      if (!made) {
        made = { name: h("button", { type: "button", class: "glass-name", onclick: () => this.stage.select(item.id) }), state: h("span", { class: "glass-state" }) };
        made.stop = h("button", { type: "button", class: "glass-button glass-text", text: WORDS.abort, "aria-label": WORDS.abortOf(item.name), onclick: () => this.stage.command("abort", { request_id: item.request }) });
        made.hide = this.stage.people.hideButton(item);
        made.root = h("li", {}, made.name, made.state, made.hide, made.stop);
        this.rows.set(item.id, made);
        this.requests.append(made.root);
      }
      setText(made.name, item.name);
      identity(made.name, item.slot);
      const why = WORDS.why[item.why];
      setText(made.state, `${WORDS.state[item.state]}${why ? ": " + why : ""}, ${WORDS.tokens(item.tokens)}`);
      made.stop.hidden = item.state === "finished";
      this.stage.people.showHide(made.hide, item);
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
    this.knobs.replaceChildren(...Object.entries(knobs).flatMap(([name, knob]) => [this.knob(name, knob), ...(knob.compare || []).map((pair) => this.compareButton(name, knob, pair))]));
  }

  compareButton(name, knob, [value, other]) {
    const said = WORDS.compareWith(other === true ? WORDS.on : other === false ? WORDS.off : named(`choice.${other}`, String(other)));
    return h("button", { type: "button", class: "glass-button glass-text", text: said, disabled: Boolean(knob.why), "aria-label": `${named(`knob.${name}`, name)}: ${said}`, onclick: () => this.compare(name, [value, other]) });
  }

  // The last requests run again in two modes; the picture of both comes beside the one that is there.
  async compare(knob, values) {
    const { stage } = this, reply = await stage.command("compare", { knob, values });
    if (!reply.ok || stage.state.views[0] === "compare") return;
    stage.tab = 1;
    stage.max = stage.phone ? 1 : null;
    stage.setView({ index: 1 }, "compare");
  }

  knob(name, knob) {
    const send = (value) => this.stage.people.knob(name, value, knob.cost).then((reply) => { if (!reply.ok) this.shown = ""; });
    const off = Boolean(knob.why);
    let control;
    if (knob.choices) {
      control = h("select", { class: "glass-select", disabled: off, onchange: () => { send(knob.choices[control.selectedIndex]); control.blur(); } },
        ...knob.choices.map((c) => h("option", { text: c === true ? WORDS.on : c === false ? WORDS.off : named(`choice.${c}`, String(c)), selected: c === knob.value })));
    } else if (typeof knob.value === "boolean") {
      control = h("input", { type: "checkbox", checked: knob.value, disabled: off, onchange: () => { send(control.checked); control.blur(); } });
    } else {
      control = h("input", { type: "number", class: "glass-number", disabled: off, value: String(knob.value), min: String(knob.min ?? ""), max: String(knob.max ?? ""), step: String(knob.step ?? (Number.isInteger(knob.value) ? 1 : "any")),
        onchange: () => { const value = Number(control.value); if (control.value !== "" && Number.isFinite(value)) send(clamp(value, knob.min ?? -Infinity, knob.max ?? Infinity)); } });
    }
    const note = off ? phrase(knob.why, "said") : WORDS.cost[knob.cost] || knob.note || "";
    return h("label", { class: off ? "glass-off" : null }, h("span", { text: named(`knob.${name}`, (knob.label || name).replace(/_/g, " ")) }), control, h("small", { text: note }));
  }
}
