// A panel's second row: what the live engine can be asked to do for its picture. The server knows the arguments
// (viz/stage/offers.py); a click names the offer and the choice.
class Offers {
  constructor(panel) {
    Object.assign(this, { panel, stage: panel.stage, made: [] });
    this.says = h("span", { class: "glass-lacks" });
    this.root = h("div", { class: "glass-offers", role: "group", "aria-label": WORDS.offers.title, hidden: true });
  }

  // Why none of them can be taken here; "" where they can.
  get lacks() {
    const { stage } = this;
    if (stage.file || stage.status.live === false) return WORDS.offers.recorded;
    return stage.people.isGuest ? WORDS.people.hostOnly : "";
  }

  show(figure) {
    const offers = (figure && figure.offers) || [], lacks = this.lacks;
    const seen = JSON.stringify([offers, lacks, spoken]);
    if (seen === this.seen) return;
    this.seen = seen;
    this.close();
    this.root.hidden = !offers.length;
    this.made = offers.map((offer) => this.button(offer, lacks));
    const whole = lacks || (offers.length === 1 ? offers[0].why : "");
    setText(this.says, whole);
    this.says.title = whole;
    this.root.replaceChildren(...this.made.map((one) => one.button), ...(whole ? [this.says] : []));
  }

  // A greyed one stays within reach of the keyboard and says why.
  button(offer, lacks) {
    const many = offer.choices.length > 1, why = lacks || offer.why;
    const act = () => { if (why) this.stage.tellNotice(why, false); else if (many) one.menu.toggle(); else this.take(offer, 0); };
    const button = h("button", { type: "button", class: "glass-button glass-text glass-offer", "aria-disabled": why ? "true" : null, title: why || offer.label, onclick: act }, h("span", { text: offer.label }), many ? h("i", { "aria-hidden": "true" }) : null);
    const one = { button };
    if (many && !why) one.menu = new OfferMenu(this, offer, button);
    return one;
  }

  async take(offer, choice) {
    if (this.busy) return;
    this.busy = true;
    this.root.setAttribute("aria-busy", "true");
    try {
      await this.stage.command("offer", { view: this.panel.view, id: offer.id, choice, label: offer.choices[choice] });
    } finally {
      this.busy = false;
      this.root.removeAttribute("aria-busy");
    }
  }

  close() { for (const one of this.made) if (one.menu) one.menu.remove(); }
}

class OfferMenu extends Menu {
  constructor(offers, offer, button) {
    super();
    Object.assign(this, { offers, button });
    const pick = (choice) => { this.close(); offers.take(offer, choice); };
    this.menu = h("div", { class: "glass-menu glass-choices", role: "menu", "aria-label": offer.label, hidden: true, onkeydown: (e) => this.key(e), onfocusout: (e) => { if (!this.menu.contains(e.relatedTarget) && e.relatedTarget !== button) this.close(false); } },
      ...offer.choices.map((text, i) => h("button", { type: "button", role: "menuitem", class: "glass-item", tabIndex: -1, text, onclick: () => pick(i) })));
    button.setAttribute("aria-haspopup", "menu");
    button.setAttribute("aria-expanded", "false");
    this.outside = (e) => { if (!this.menu.contains(e.target) && !button.contains(e.target)) this.close(false); };
  }

  // Over the page, since a panel would cut it: below its button, or above where there is more room.
  open() {
    const { root } = this.offers.stage, page = root.getBoundingClientRect(), box = this.button.getBoundingClientRect();
    root.append(this.menu);
    root.addEventListener("pointerdown", this.outside);
    this.menu.hidden = false;
    const above = box.top - page.top, below = page.bottom - box.bottom, under = below >= Math.min(this.menu.offsetHeight + 8, above);
    const place = { left: `${clamp(box.left - page.left, 8, Math.max(page.width - this.menu.offsetWidth - 8, 8))}px`, right: "auto", maxHeight: `${(under ? below : above) - 12}px` };
    Object.assign(this.menu.style, place, under ? { top: `${box.bottom - page.top + 4}px`, bottom: "auto" } : { top: "auto", bottom: `${page.bottom - box.top + 4}px` });
    this.button.setAttribute("aria-expanded", "true");
    this.menu.firstChild.focus();
  }

  close(back = true) {
    this.offers.stage.root.removeEventListener("pointerdown", this.outside);
    super.close(back);
  }

  remove() {
    this.close(false);
    this.menu.remove();
  }
}
