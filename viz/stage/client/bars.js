// Header, prompt and chips, caption, transport: plain elements that change only where a word changed.
class Header {
  constructor(stage) {
    this.stage = stage;
    this.title = h("h1", { class: "glass-title", text: "Glass Engine" });
    this.model = h("span", { class: "glass-model" });
    this.device = h("span", { class: "glass-device" });
    this.source = h("span", { class: "glass-source", "data-state": "loading" }, h("i"), h("span"));
    this.rate = h("span", { class: "glass-rate" });
    this.presets = h("select", { class: "glass-select", "aria-label": WORDS.examples, hidden: true, onchange: () => this.preset() });
    this.back = h("button", { type: "button", class: "glass-button glass-text", text: WORDS.backToLive, hidden: true, onclick: () => stage.command("live") });
    this.file = h("input", { type: "file", hidden: true, tabIndex: -1, "aria-label": WORDS.open, onchange: () => this.stage.openRecording(this.file) });
    this.open = iconButton("open", WORDS.open, () => this.file.click(), { hidden: true, class: "glass-button glass-minor" });
    this.language = h("select", { class: "glass-select glass-minor glass-language", "aria-label": WORDS.language, onchange: () => stage.setLanguage(this.language.value) },
      ...Object.entries(LANGUAGES).map(([name, words]) => h("option", { value: name, lang: name, text: words["language.name"], selected: name === spoken })));
    this.tools = h("span", { class: "glass-tools" }, stage.share.button, this.open, this.file,
      iconButton("theme", WORDS.theme, () => stage.toggleTheme()), iconButton("projector", `${WORDS.projector} (P)`, () => stage.toggleProjector(), { class: "glass-button glass-minor glass-online" }),
      iconButton("help", `${WORDS.help} (?)`, () => stage.help(), { class: "glass-button glass-minor" }), (this.drawer = iconButton("drawer", `${WORDS.inspector} (I)`, () => stage.toggleDrawer(), { "aria-expanded": "false" })));
    this.root = h("header", { class: "glass-header" }, h("span", { class: "glass-logo", "aria-hidden": "true" }), this.title, this.source, this.model, this.device, this.rate,
      h("span", { class: "glass-gap" }), ...stage.people.control(), this.back, stage.tour.button, this.presets, this.language, this.tools);
  }

  preset() {
    const name = this.presets.value;
    this.presets.value = "";
    if (name) this.stage.preset(name);
  }

  show(status) {
    setText(this.model, (status.model && status.model.name) || "");
    setText(this.device, status.device || "");
    const kind = status.state === "dead" ? "dead" : status.state === "loading" ? "loading" : status.live ? "live" : "recording";
    this.source.dataset.state = this.stage.online ? kind : "offline";
    setText(this.source.lastChild, this.stage.online ? WORDS.source[kind] : WORDS.source.offline);
    this.source.title = status.badge || "";
    setText(this.rate, status.tokens_per_s > 0 ? `${numberText(status.tokens_per_s)} ${WORDS.perSec}` : "");
    const presets = status.presets || [];
    const names = JSON.stringify(presets);
    if (names !== this.names) {
      this.names = names;
      this.presets.hidden = !presets.length;
      this.presets.replaceChildren(h("option", { value: "", text: WORDS.examples }), ...presets.map((p) => h("option", { value: p.name, text: named(`preset.${p.name}.title`, p.title || p.name) })));
    }
    const recording = status.recording || {};
    this.open.hidden = !recording.open;
    this.back.hidden = !recording.back;
  }
}

class PromptBar {
  constructor(stage) {
    this.stage = stage;
    this.input = h("input", { class: "glass-input", type: "text", autocomplete: "off", spellcheck: false, placeholder: WORDS.prompt, "aria-label": WORDS.prompt });
    this.send = h("button", { type: "submit", class: "glass-button glass-primary", text: WORDS.send });
    this.form = h("form", { class: "glass-form", onsubmit: (e) => { e.preventDefault(); this.submit(); } }, this.input, this.send);
    this.chips = h("div", { class: "glass-chips", role: "group", "aria-label": WORDS.requests });
    this.root = h("div", { class: "glass-prompt" }, this.form, this.chips);
    this.made = [];
  }

  async submit() {
    const text = this.input.value;
    if (!text.trim()) return this.input.focus();
    this.input.value = "";
    const reply = await this.stage.command("prompt", { text, ...this.stage.sampling });
    if (!reply.ok && !this.input.value) this.input.value = text;
    if (reply.ok && reply.queued && reply.name && !reply.sentence) this.stage.tellNotice(WORDS.queuedAs(reply.name), false);
  }

  hint(text) { if (this.input.placeholder !== text) this.input.placeholder = text; }

  // Chips are reused in place, so that a click never lands on an element that was just replaced.
  show(row) {
    const { items, more } = row;
    while (this.made.length < items.length) this.made.push(this.chip());
    this.made.forEach((chip, i) => {
      chip.root.hidden = i >= items.length;
      if (i < items.length) this.fill(chip, items[i]);
    });
    if (!this.more) this.chips.append((this.more = h("span", { class: "glass-more" })));
    setText(this.more, more ? WORDS.more(more) : "");
    this.items = items;
  }

  chip() {
    const chip = { letter: h("b"), state: h("span"), bar: h("i") };
    chip.root = h("button", { type: "button", class: "glass-chip", onclick: () => this.stage.select(this.stage.state.selection === chip.item.id ? null : chip.item.id) }, chip.letter, chip.state, chip.bar);
    this.more ? this.chips.insertBefore(chip.root, this.more) : this.chips.append(chip.root);
    return chip;
  }

  fill(chip, item) {
    chip.item = item;
    const { root } = chip;
    if (root.dataset.state !== item.state) root.dataset.state = item.state;
    identity(root, item.slot);
    setText(chip.letter, short(item.name, 6));
    const prefill = item.state === "prefill";
    const words = prefill ? `${thousands(item.done)}/${thousands(item.of)}` : item.state === "decode" ? `${thousands(item.tokens)}/${thousands(item.max)}` : item.state === "finished" ? "✓" : WORDS.state[item.state];
    setText(chip.state, words);
    const share = prefill ? item.done / Math.max(item.of, 1) : item.state === "decode" ? item.tokens / Math.max(item.max, 1) : 0;
    chip.bar.style.width = `${Math.round(100 * clamp(share, 0, 1))}%`;
    const chosen = String(this.stage.state.selection === item.id);
    if (root.getAttribute("aria-pressed") !== chosen) root.setAttribute("aria-pressed", chosen);
    const label = `${item.name}: ${WORDS.state[item.state]}${item.why && WORDS.why[item.why] ? ", " + WORDS.why[item.why] : ""}, ${WORDS.tokens(item.tokens)}`;
    if (root.title !== label) { root.title = label; root.setAttribute("aria-label", label); }
  }
}

// The request's hue as three CSS variables: fill, text on it, outline.
function identity(element, slot) {
  const color = slot === null || slot === undefined ? "request-other" : `request-${slot % 6}`;
  if (element.dataset.color === color) return;
  element.dataset.color = color;
  element.style.setProperty("--chip", `var(--g-${color})`);
  element.style.setProperty("--chip-on", `var(--g-on-${color})`);
  element.style.setProperty("--chip-line", `var(--g-${color}-line)`);
}

class Caption {
  constructor() {
    this.text = h("span", { class: "glass-sentence" });
    this.live = h("span", { class: "glass-hidden", "aria-live": "polite" });
    this.root = h("div", { class: "glass-caption" }, this.text, this.live);
    this.at = 0;
    this.timer = 0;
  }

  // Seen at once; spoken at most every three seconds, and never while the engine runs freely.
  show(text, silent) {
    setText(this.text, text);
    clearTimeout(this.timer);
    if (silent) return;
    const say = () => { this.at = performance.now(); setText(this.live, text); };
    const wait = this.at + 3000 - performance.now();
    if (wait <= 0) say(); else this.timer = setTimeout(say, wait);
  }

  destroy() { clearTimeout(this.timer); }
}

const PACES = [0.5, 1, 2, 4, 8, 16, 32];

class Transport {
  constructor(stage) {
    this.stage = stage;
    this.back = iconButton("back", WORDS.back, () => stage.back());
    this.play = h("button", { type: "button", class: "glass-button glass-play", onclick: () => stage.playPause() });
    setIcon(this.play, "play", WORDS.play);
    this.step = iconButton("step", WORDS.step, () => stage.forward());
    this.live = h("button", { type: "button", class: "glass-button glass-live", onclick: () => stage.goLive() }, h("i"), h("span", { text: WORDS.live }));
    this.pace = h("select", { class: "glass-select glass-pace", "aria-label": WORDS.pace, onchange: () => stage.command("pace", { value: this.pace.value === "free" ? null : Number(this.pace.value) }) });
    this.pace.append(...PACES.map((n) => h("option", { value: String(n), text: WORDS.perSecond(n) })), h("option", { value: "free", text: WORDS.free }));
    this.scrubber = new Scrubber(stage);
    this.count = h("span", { class: "glass-count", text: WORDS.noStep });
    this.root = h("div", { class: "glass-transport", role: "group", "aria-label": WORDS.transport }, this.back, this.play, this.step, this.live, this.pace, this.scrubber.root, this.count);
  }

  show(status, at) {
    const running = status.state === "running";
    setIcon(this.play, running && at.following ? "pause" : "play", running && at.following ? WORDS.pause : WORDS.play);
    this.live.classList.toggle("glass-on", Boolean(at.following));
    this.live.setAttribute("aria-pressed", String(Boolean(at.following)));
    const value = status.pace === null || status.pace === undefined ? "free" : String(status.pace);
    if (this.shownPace !== value) {
      this.shownPace = value;
      if (value !== "free" && ![...this.pace.options].some((o) => o.value === value)) this.pace.append(h("option", { value, text: WORDS.perSecond(Number(value)) }));
      this.pace.value = value;
    }
    setText(this.count, at.step === null || at.step === undefined ? WORDS.noStep : WORDS.stepOf(thousands(at.step), thousands(at.last)));
    this.scrubber.show(at);
  }
}
