// Who else is here: the header's control and its dialog, following the host, and what a guest may not touch.
class People {
  constructor(stage) {
    this.stage = stage;
    this.said = null; // what the server says of this room; null in a private place
    this.follow = true;
  }

  get isGuest() { return Boolean(this.said && this.said.role !== "host"); }
  get alone() { return Boolean(this.said && this.said.everyone_hosts && this.said.count < 2); }
  get following() { return Boolean(this.said && this.said.following); }

  // The control in the header; built anew with the header.
  control() {
    this.text = h("span");
    this.button = h("button", { type: "button", class: "glass-button glass-text glass-people", hidden: true, "aria-haspopup": "dialog", onclick: () => this.open() }, icon("people"), this.text);
    this.again = h("button", { type: "button", class: "glass-button glass-text glass-follow", hidden: true, onclick: () => this.followAgain() });
    this.show();
    return [this.again, this.button];
  }

  take(said) {
    const before = this.said, newRole = said && (!before || before.role !== said.role || before.room !== said.room);
    this.said = said;
    if (said && said.offered && !(before && before.offered)) this.stage.tellNotice(WORDS.people.offered, false);
    if (newRole) this.stage.remember();
    this.lead();
    this.show();
    if (this.dialog) this.fill();
  }

  // What the server says we look at; the layout follows.
  lead() {
    const { stage } = this, lead = this.following ? this.said.lead : null;
    if (!lead) return;
    const views = (lead.views || []).filter((name) => stage.catalogue.some((v) => v.name === name));
    const moved = views.length && views.join() !== stage.state.views.join();
    for (const [key, value] of Object.entries(lead)) if (key in stage.state && key !== "views") stage.state[key] = value;
    if (moved) { stage.state.views = views; stage.arrange(); stage.tell(); }
    stage.remember();
  }

  // A guest who scrubs, or chooses something for himself, follows no longer.
  moved(changes) {
    if (!this.following) return;
    if (!["step", "views", "selection", "chapter", "beat", "layer", "head", "axis", "ranges"].some((key) => key in changes)) return;
    this.follow = false;
    this.said = { ...this.said, following: false };
    this.show();
  }

  // True if there was somebody to follow.
  followAgain() {
    if (!this.isGuest || this.following) return this.isGuest;
    this.follow = true;
    this.stage.tell();
    return true;
  }

  show() {
    if (!this.button) return;
    const { said, alone } = this;
    this.button.hidden = !said;
    this.again.hidden = !this.isGuest;
    if (!said) return;
    const role = WORDS.people.role[said.role];
    setText(this.text, alone ? "" : said.everyone_hosts ? String(said.count) : `${said.count} · ${role}`);
    const label = `${WORDS.people.title}: ${WORDS.people.here(said.count)}, ${role}, ${said.room}`;
    if (this.button.title !== label) { this.button.title = label; this.button.setAttribute("aria-label", label); }
    setText(this.again, this.following ? WORDS.people.following : WORDS.people.followAgain);
    this.again.classList.toggle("glass-on", this.following);
    this.again.setAttribute("aria-pressed", String(this.following));
  }

  // After the bars were shown: what only the host may touch is greyed, with the reason.
  grey() {
    const off = this.isGuest;
    this.stage.root.classList.toggle("glass-guest", off);
    const { transport, header, prompt } = this.stage;
    const forward = off && this.stage.at.following; // stepping through the past is everybody's own
    for (const [element, held] of [[transport.play, off], [transport.step, forward], [transport.pace, off], [header.presets, off], [header.back, off], [header.open, off], [prompt.input, off && !this.mayPrompt], [prompt.send, off && !this.mayPrompt]]) {
      if (!element || element.disabled === held) continue;
      element.disabled = held;
      if (held) { element.dataset.title = element.title; element.title = this.why(element); } else { element.title = element.dataset.title || ""; }
    }
    if (off) prompt.hint(this.mayPrompt ? WORDS.people.guestPrompt : this.why(prompt.input));
  }

  get mayPrompt() { return this.said.role === "guest" && !this.said.locked.prompts; }

  why(element) {
    if (element !== this.stage.prompt.input && element !== this.stage.prompt.send) return WORDS.people.hostOnly;
    return this.said.role === "watcher" ? WORDS.people.watchOnly : WORDS.people.promptsLocked;
  }

  knobs(knobs) {
    return this.isGuest ? Object.fromEntries(Object.entries(knobs).map(([name, knob]) => [name, { ...knob, why: knob.why || WORDS.people.hostOnly }])) : knobs;
  }

  // Before a knob empties somebody's cache it says whose; `question` is asked with their names.
  async agrees(name, value, cost, question) {
    if (cost === "nothing" || !this.said || this.isGuest) return true;
    const dry = await this.stage.command("knob", { name, value, dry_run: true });
    const names = (dry.ok && dry.recompute) || [];
    return dry.ok && (!names.length || this.confirm(question(names.join(", "))));
  }

  async knob(name, value, cost) {
    if (!(await this.agrees(name, value, cost, WORDS.people.recompute))) return { ok: false };
    return this.stage.command("knob", { name, value });
  }

  confirm(text) {
    return new Promise((done) => {
      const yes = h("button", { value: "yes", class: "glass-button glass-primary", text: WORDS.people.goOn });
      const dialog = h("dialog", { class: "glass-dialog", "aria-label": WORDS.knobs, onclose: () => { dialog.remove(); done(dialog.returnValue === "yes"); } },
        h("p", { text }), h("form", { method: "dialog", class: "glass-row" }, yes, h("button", { value: "no", class: "glass-button glass-text", text: WORDS.people.leaveIt })));
      this.stage.root.append(dialog);
      dialog.showModal();
    });
  }

  // In the drawer, beside a request.
  hideButton(item) {
    return h("button", { type: "button", class: "glass-button glass-text", hidden: true, onclick: () => this.stage.command("people_hide", { request_id: item.request, on: !this.hides(item) }) });
  }

  hides(item) { return Boolean(this.said && this.said.hidden.includes(item.request)); }

  showHide(button, item) {
    button.hidden = !this.said || this.isGuest || this.alone;
    if (button.hidden) return;
    setText(button, this.hides(item) ? WORDS.people.showText : WORDS.people.hideText);
    button.setAttribute("aria-label", (this.hides(item) ? WORDS.people.showTextOf : WORDS.people.hideTextOf)(item.name));
  }

  // ---- the dialog ----

  open() {
    if (!this.said || this.dialog) return;
    this.body = h("div", { class: "glass-people-list" });
    this.dialog = h("dialog", { class: "glass-dialog glass-people-dialog", "aria-label": WORDS.people.title, onclose: () => { this.dialog.remove(); this.dialog = null; } },
      h("h2", { text: WORDS.people.title }), this.body, h("form", { method: "dialog" }, h("button", { class: "glass-button glass-primary", text: WORDS.close })));
    this.fill();
    this.stage.root.append(this.dialog);
    this.dialog.showModal();
  }

  fill() {
    const { said } = this;
    const text = JSON.stringify([said && { ...said, lead: null }]);
    if (text === this.filled && this.body.childElementCount) return;
    this.filled = text;
    if (!said) return this.dialog.close();
    const ask = (name, args = {}) => this.stage.command(`people_${name}`, args);
    const act = (label, name, args, of = "") => h("button", { type: "button", class: "glass-button glass-text", text: label, "aria-label": of ? `${label}: ${of}` : null, onclick: () => ask(name, args) });
    const host = said.role === "host";
    const rows = said.people.map((p) => h("li", { class: p.here ? null : "glass-off" },
      h("b", { text: p.me ? WORDS.people.you(p.name) : p.name }), h("span", { text: WORDS.people.role[p.role] }),
      host && p.role !== "host" && p.here ? act(WORDS.people.offer, "offer", { guest: p.id }, p.name) : null,
      host && p.role !== "host" ? act(WORDS.people.remove, "remove", { guest: p.id }, p.name) : null));
    const lock = (label, key) => h("label", {}, h("input", { type: "checkbox", checked: said.locked[key], onchange: (e) => ask("lock", { [key]: e.target.checked }) }), h("span", { text: label }));
    const link = (label, token) => h("button", { type: "button", class: "glass-button glass-text", text: label, onclick: (e) => this.copy(token, e.target) });
    this.body.replaceChildren(
      h("p", { text: WORDS.people.room(said.room) }),
      ...(said.offered ? [h("p", { text: WORDS.people.offered }), act(WORDS.people.accept, "accept")] : []),
      ...(said.away ? [h("p", { text: WORDS.people.away })] : []),
      ...(said.everyone_hosts ? [h("p", { text: WORDS.people.everyone }), act(WORDS.people.claim, "claim")] : []),
      ...(host ? [h("div", { class: "glass-row" }, link(WORDS.people.promptLink, said.links.prompt), link(WORDS.people.watchLink, said.links.watch)), h("div", { class: "glass-column" }, lock(WORDS.people.lockPrompts, "prompts"), lock(WORDS.people.lockDoor, "door"))] : []),
      h("ul", { class: "glass-guests" }, ...rows));
  }

  address(token) {
    const url = new URL(location.href);
    url.search = "";
    url.searchParams.set("room", this.said.room);
    url.searchParams.set("join", token);
    return url.href;
  }

  async copy(token, button) {
    const text = this.address(token);
    try {
      await navigator.clipboard.writeText(text);
      setText(button, WORDS.people.copied);
    } catch { // no clipboard here: show it to be copied by hand
      const field = h("input", { type: "text", readOnly: true, value: text, class: "glass-input", "aria-label": button.textContent });
      button.after(field);
      field.select();
    }
  }

  // The address bar is a link that gives no more than what this person may hand out.
  toUrl(url) {
    if (!this.said) {
      if (this.stage.arrived) url.searchParams.delete("join");
      return;
    }
    if (!this.said.join) return url.searchParams.delete("join");
    url.searchParams.set("room", this.said.room);
    url.searchParams.set("join", this.said.join);
  }
}
