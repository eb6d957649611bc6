"""The formula of every mechanism in LaTeX, and as MathML, which browsers draw without a script."""

from latex2mathml.converter import convert

FORMULAS: dict[str, str] = {
    "Softmax": r"y = \mathrm{softmax}\left(\frac{q k^\top}{\sqrt{d}}\right) v",
    "Differential": (
        r"y = \mathrm{norm}\left(\left(\mathrm{softmax}\left(\frac{q_1 k_1^\top}{\sqrt{d}}\right) "
        r"- \lambda \, \mathrm{softmax}\left(\frac{q_2 k_2^\top}{\sqrt{d}}\right)\right) v\right)"
    ),
    "Factors": (
        r"y_i = \sum_j \mathrm{softmax}_j\left(q_i^\top k_j + q_i^\top r_{j-i} + u^\top k_j + t^\top r_{j-i}\right) v_j"
    ),
    "SKA": r"y = \mathrm{softmax}\left(\frac{q K^\top}{\sqrt{d}}\right) v, \quad K \text{ learned}",
    "CSKA": r"y = \mathrm{softmax}\left(\frac{\mathrm{conv}(q)}{\sqrt{d}}\right) v",
    "XCA": r"y = v \, \mathrm{softmax}\left(\tau \, \hat{q}^\top \hat{k}\right)^\top",
    "Linear": (
        r"y = \frac{\phi(q) \left(\phi(k)^\top v\right)}{\phi(q) \sum_j \phi(k_j)^\top}, "
        r"\quad \phi(x) = \mathrm{elu}(x) + 1"
    ),
    "FLatten": (
        r"y = \frac{f(q) \left(f(k)^\top v\right)}{f(q) \sum_j f(k_j)^\top}, "
        r"\quad f(x) = \frac{\|\mathrm{relu}(x)\|}{\|\mathrm{relu}(x)^p\|} \, \mathrm{relu}(x)^p"
    ),
    "PolaFormer": (
        r"y = \left[ \mathrm{lin}\left([q_+, q_-], [k_+, k_-], v_1\right), "
        r"\mathrm{lin}\left([q_-, q_+], [k_+, k_-], v_2\right) \right], "
        r"\quad x_\pm = \mathrm{relu}(\pm x)^p"
    ),
    "MHLA": (
        r"y_i = \frac{\phi(q_i) \sum_b M_{ib} S_b}{\phi(q_i) \sum_b M_{ib} z_b}, "
        r"\quad S_b = \sum_{j \in b} \phi(k_j)^\top v_j, \quad z_b = \sum_{j \in b} \phi(k_j)^\top"
    ),
    "InLine": (
        r"y = \frac{1}{\sqrt{d}} \, q \left(\frac{k^\top v}{N} - \bar{k}^\top \bar{v}\right) + \bar{v}"
    ),
    "Performer": (
        r"y = \frac{\phi(q) \left(\phi(k)^\top v\right)}{\phi(q) \sum_j \phi(k_j)^\top}, "
        r"\quad \phi(x) = \frac{1}{\sqrt{r}} \exp\left(W x - \frac{\|x\|^2}{2}\right)"
    ),
    "ViT3": (
        r"y = f_{W'}(q), \quad "
        r"W' = W - \eta \, \mathrm{clip}\left(\nabla_W \frac{-\langle f_W(k), v \rangle}{3 N}\right)"
    ),
    "Agent": (
        r"y = \mathrm{softmax}\left(\frac{q a^\top}{\sqrt{d}}\right) "
        r"\mathrm{softmax}\left(\frac{a k^\top}{\sqrt{d}}\right) v, \quad a = \mathrm{pool}(q)"
    ),
    "Linformer": r"y = \mathrm{softmax}\left(\frac{q (E k)^\top}{\sqrt{d}}\right) F v, \quad E, F \text{ learned}",
    "Nystrom": (
        r"y = \mathrm{softmax}\left(q b^\top\right) \mathrm{softmax}\left(a b^\top\right)^{+} "
        r"\mathrm{softmax}\left(a k^\top\right) v, \quad a, b = \text{segment means of } q, k"
    ),
    "PVT": (
        r"y = \mathrm{softmax}\left(\frac{q k_r^\top}{\sqrt{d}}\right) v_r, "
        r"\quad k_r, v_r \text{ of } \mathrm{LN}\left(\mathrm{Conv}_{r \times r, \text{stride } r}(x)\right)"
    ),
    "TopK": (
        r"y_i = \sum_{j \in T_i} \mathrm{softmax}_{j \in T_i}\left(\frac{q_i k_j^\top}{\sqrt{d}}\right) v_j, "
        r"\quad T_i = \text{the } k \text{ largest } q_i k_j^\top"
    ),
    "Sparsifiner": (
        r"y_i = \mathrm{softmax}\left(\frac{q_i K_{S}^\top}{\sqrt{d}}\right) V_{S}, "
        r"\quad S = \text{the } k \text{ largest of } \mathrm{softmax}\left(W_q q_i (E W_k k)^\top\right) U"
    ),
    "BRA": (
        r"y_i = \mathrm{softmax}\left(\frac{q_i K_{R}^\top}{\sqrt{d}}\right) V_{R}, "
        r"\quad R = \text{the } k \text{ best regions by } \bar{q} \, \bar{k}^\top"
    ),
    "MoBA": (
        r"y_i = \mathrm{softmax}\left(\frac{q_i K_{B}^\top}{\sqrt{d}}\right) V_{B}, "
        r"\quad B = \text{own block and the best by } q_i \bar{k}^\top"
    ),
    "Reformer": (
        r"y_i = \mathrm{softmax}\left(\frac{q_i \hat{q}_{P}^\top}{\sqrt{d}}\right) v_{P}, "
        r"\quad P = \text{tokens near in the order of hash buckets}"
    ),
    "Routing": (
        r"y_i = \mathrm{softmax}\left(\frac{q_i k_{c}^\top}{\sqrt{d}}\right) v_{c}, "
        r"\quad c = \text{keys of the centroids that chose } q_i"
    ),
    "DAT": (
        r"y = \mathrm{softmax}\left(\frac{q \tilde{k}^\top}{\sqrt{d}} + B\right) \tilde{v}, "
        r"\quad \tilde{k}, \tilde{v} \text{ of } x \text{ at } p + \mathrm{offset}(q)"
    ),
    "DeformableDETR": (
        r"y_i = \sum_k A_{ik} \, v\left(p_i + o_{ik}\right), "
        r"\quad A_i = \mathrm{softmax}(W x_i), \; o_i = W' x_i"
    ),
    "Window": (
        r"y_i = \mathrm{softmax}\left(\frac{q_i K_{W}^\top}{\sqrt{d}} + B\right) V_{W}, "
        r"\quad W = \text{the window of } i"
    ),
    "Neighbourhood": (
        r"y_i = \mathrm{softmax}\left(\frac{q_i K_{\rho(i)}^\top}{\sqrt{d}} + B\right) V_{\rho(i)}, "
        r"\quad \rho(i) = \text{the window around } i"
    ),
    "Axial": (
        r"y = A_{\mathrm{row}} A_{\mathrm{column}} v, \quad "
        r"A_{R}(i) = \mathrm{softmax}\left(\frac{q_i K_{R(i)}^\top}{\sqrt{d}}\right)"
    ),
    "CSWin": (
        r"y_i = \mathrm{softmax}\left(\frac{q_i K_{S}^\top}{\sqrt{d}}\right) V_{S}, "
        r"\quad S = \text{the horizontal or vertical stripe of } i \text{, by head}"
    ),
    "MiTA": (
        r"y = \mathrm{softmax}\left(\frac{[q Q^\top, \; q K_e^\top]}{\sqrt{d}}\right) "
        r"\left[\mathrm{softmax}\left(\frac{Q k^\top}{\sqrt{d}}\right) v, \; V_e\right], "
        r"\quad Q = \mathrm{pool}(q)"
    ),
    "NSA": (
        r"y = g_c A(q, \bar{K}, \bar{V}) + g_s A(q, K_{\text{best}}, V_{\text{best}}) "
        r"+ g_w A(q, K_{\text{near}}, V_{\text{near}})"
    ),
    "Conv": r"y_i = \sum_p W_p \, x_{i+p}",
    "DeformableConv": r"y_i = \sum_p W_p \, m_{i,p} \, x\left(i + p + o_i(p)\right)",
    "DynamicConv": (
        r"y_i = W \sum_p \mathrm{softmax}_p\left(D h_i\right) h_{i+p}, \quad h = \mathrm{GLU}(x)"
    ),
}  # fmt: skip
"""As in the papers, where the card's plain formula is hard to read: q, k, v are queries, keys and values, i a query, j
a key, p a tap of a kernel."""


def formula(name: str, plain: str) -> str:
    """The formula of a mechanism as MathML, to stand on a line of its own; without one, the plain one of its card."""
    if name not in FORMULAS:
        return f"`{plain}`"
    math = convert(FORMULAS[name], display="block").replace(' xmlns="http://www.w3.org/1998/Math/MathML"', "")
    return f'<div class="formula">{math}</div>'
