"""Words in the names of columns, in English and other languages, each once.

`texto`, `clean_text` and `is_spam` are found by `TEXTS`, `LABELS`, `LABEL_MARKS`, `QUESTIONS` and
`ANSWERS` if no column has a name that a task's spec lists, and no other column may be meant.
Messages propose columns by all of them.
"""

from __future__ import annotations

import functools
import re
import unicodedata

_SHORT = 4
"""Letters of a word that may end another one by chance: `context`."""
_PREPOSITIONS = {
    *("da", "de", "degli", "dei", "del", "della", "dello", "des", "di", "do", "dos", "du", "of"),
    *("van", "von"),
}
_HEADS = {
    *("категория", "номер", "содержание", "текст", "тема", "тип", "kategoria", "numer", "tresc"),
    *("isi", "nomor", "teks", "رقم", "نص", "نوع", "تاريخ", "تصنيف", "محتوى"),
}
"""Nouns that stand before their owners: `Текст обращения`, the text of the request."""
_WORDS = re.compile(r"[\s_.()-]+|(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


_BARRED = str.maketrans({"ı": "i", "ł": "l", "ø": "o", "đ": "d", "ß": "ss", "æ": "ae", "œ": "oe"})
"""Letters that Unicode does not take apart."""


def plain_word(word: str) -> str:
    """Return a word in lower case without accents."""
    letters = unicodedata.normalize("NFKD", word.strip().lower().translate(_BARRED))
    return "".join(letter for letter in letters if not unicodedata.combining(letter))


def words_of(name: str) -> list[str]:
    """Return the plain words of a column's name, the last one in the singular; [""] without any.

    What stands before a word such as `of`, or before its owner, comes last: `Avis du client` ends
    in `avis`.
    """
    parts = _WORDS.split(unicodedata.normalize("NFC", name).strip().rstrip("0123456789"))
    words = [plain_word(word) for word in parts if word]
    position = next((n for n, word in enumerate(words) if word in _PREPOSITIONS), 0)
    words = [*words[position + 1 :], *words[:position]] if position else words
    words = [*words[1:], *words[:1]] if words and words[0] in _HEADS else words
    *qualifiers, noun = words or [""]
    return [*qualifiers, f"{noun[:-3]}y" if noun.endswith("ies") else noun.removesuffix("s")]


@functools.lru_cache(maxsize=8192)
def ends_in(name: str, words: frozenset[str]) -> bool:
    """Return whether a column's name is one of some plain words, or ends in one."""
    plain, last = plain_word(name), words_of(name)[-1]
    return (
        not words.isdisjoint({plain, last, f"{last}s"})
        # Scripts without spaces, and compounds: `Kundenmeinung`.
        or any(plain.endswith(word) for word in words if not word.isascii())
        or any(last.endswith(word) for word in words if len(word) > _SHORT)
    )


def _words(*lines: str) -> frozenset[str]:
    return frozenset(plain_word(word) for line in lines for word in line.split())


def _names(*lines: str) -> frozenset[str]:
    """Return words as they are written, and without accents."""
    return _words(*lines).union(*(line.split() for line in lines))


TEXTS = _words(
    "quote critique provision remark poem",
    "text review comment tweet sentence message content utterance narrative headline body post",
    "anfrage demande solicitud solicitação richiesta zapytanie zgłoszenie обращение talep 依頼",
    "feedback resume example verbatim transcription summary subject note opinion transcript",
    "complaint clause phrase",
    "kommentar rezension bewertungstext nachricht satz inhalt beitrag freitext beschreibung",
    "meinung begründung",  # German
    "texte commentaire avis contenu",  # French
    "texto comentario reseña opinión frase contenido mensaje descripción",  # Spanish
    "testo commento recensione contenuto messaggio descrizione",  # Italian
    "comentário resenha conteúdo mensagem descrição",  # Portuguese
    "tekst opmerking recensie zin bericht inhoud omschrijving",  # Dutch
    "komentarz opinia recenzja zdanie treść opis",  # Polish
    "текст отзыв комментарий сообщение предложение описание відгук коментар",  # Russian, Ukrainian
    "metin yorum cümle mesaj görüş açıklama",  # Turkish
    "文本 内容 评论 句子 正文",  # Chinese
    "本文 テキスト 文 文章 レビュー コメント",  # Japanese
    "텍스트 문장 내용 리뷰 본문 댓글",  # Korean
    "نص النص تعليق التعليق تغريدة",  # Arabic
    "पाठ टेक्स्ट टिप्पणी वाक्य",  # Hindi
    "teks ulasan komentar kalimat",  # Indonesian
    "recension meddelande omdöme anmeldelse komentář recenze κείμενο σχόλιο",  # Swedish to Greek
    "bình_luận đánh_giá nội_dung văn_bản นิพจน์",
    "ข้อความ รีวิว نظر متن دیدگاه",
    "beschwerde erfahrungsbericht plainte réclamation témoignage queja reclamo reclamación relato",
    "reclamação depoimento reclamo segnalazione klacht reactie skarga opinie жалоба şikayet",
    "投诉 评价 评语 反馈 留言 微博 推文 帖子 苦情 口コミ",
    "感想 意見 후기 의견 불만 문의 المراجعة مراجعة شكوى समीक्षा",
    "शिकायत keluhan rückmeldung notiz bemerkung anmerkung anliegen stellungnahme aussage remarque",
    "observation observaciones observação observações osservazioni tuit consulta dúvida inquiry",
    "enquiry beschrijving toelichting wiadomość uwagi wypowiedź содержание замечание твит новость",
    "içerik 描述 新闻 説明 自由記述 記事 기사 설명 رسالة محتوى وصف संदेश विवरण",
)
"""Last words of names of texts, or whole names."""
OPINIONS = _words(
    "classname label rating sentiment emotion intent stars polarity score toxicity toxic spam",
    "hate class_name annotation overall point grade clickbait sarcasm sarcastic generated outcome",
    "etikett stimmung sterne bewertung absicht étiquette note étoiles etiqueta sentimiento",
    "polaridad estrellas valoración puntuación calificación etichetta sentimento voto stelle",
    "valutazione rótulo nota estrelas polaridade sterren beoordeling etykieta sentyment ocena",
    "метка тональность оценка рейтинг мітка оцінка etiket duygu puan 标签 情感 情绪 评分 星级",
    "ラベル 感情 評価 極性 레이블 라벨 감정 평점 المشاعر التقييم लेबल भावना sentimen betyg",
    "vurdering štítek hodnocení ετικέτα συναίσθημα nhãn cảm_xúc ป้ายกำกับ ความรู้สึก برچسب احساس",
    "امتیاز cijfer waardering emotie nastrój 倾向 等级 评级 得分 分数 評点 별점 점수 रेटिंग",
    "polarité émotion emoción emozione emoção эмоция intención intenção intenzione намерение 意图",
    "意図 의도 星数 点数 スコア mood tone intento intentie intencja niyet emocja wydźwięk gwiazdki",
    "сентимент yıldız punteggio تقييم",
)
"""Last words of names of labels that say what a text says, or whole names."""
LABELS = OPINIONS | _words(
    "category class topic type group priority status reason specialty severity department queue",
    "tag product genre kategorie klasse thema abteilung catégorie classe thème categoría clase",
    "tipo categoria argomento categorie onderwerp afdeling kategoria klasa категория класс",
    "категорія клас kategori sınıf durum 类别 分类 カテゴリ カテゴリー 分類 카테고리 분류 تصنيف",
    "التصنيف الفئة श्रेणी třída κατηγορία phân_loại dringlichkeit priorität zufriedenheit typ",
    "satisfaction priorité gravité prioridad satisfacción prioridade satisfação priorità",
    "soddisfazione prioriteit priorytet приоритет тип вид öncelik tür 优先级 类型 種別 種類 区分",
    "優先度 유형 종류 우선순위 분야 الأولوية النوع वर्ग प्राथमिकता csat urgency difficulty",
    "reparto équipe equipo equipe zespół команда 部门 部署 부서 bölüm département departamento",
    "dział отдел urgence urgencia urgência urgenza pilność срочность aciliyet 紧急程度 緊急度",
    "긴급도 gravedad gravidade gravità bereich gruppe ergebnis einstufung motif domaine rubrique",
    "tema motivo setor tipologia soort urgentie reden rodzaj powód причина рубрика derece",
    "departman ジャンル 등급 장르 주제 القسم فئة विभाग प्रकार",
)
"""Last words of names of labels, or whole names."""
LABEL_MARKS = _words("is has")
"""First words of names of labels: `is_depression`."""
QUESTIONS = _words(
    "frage anweisung eingabe pregunta instrucción domanda istruzione pergunta instrução vraag",
    "pytanie вопрос питання soru 问题 指令 質問 指示 질문 سؤال السؤال प्रश्न",
    "pertanyaan fråga otázka",
)
"""Names of questions and prompts in other languages."""
ANSWERS = _words(
    "antwort ausgabe respuesta réponse risposta resposta antwoord odpowiedź ответ відповідь",
    "cevap yanıt 回答 答案 输出 応答 答え 답변 대답 إجابة الإجابة جواب उत्तर jawaban svar odpověď",
)
"""Names of answers in other languages."""

# Words of names that messages propose.
ASKING = QUESTIONS | _words(
    "question prompt instruction input user human query q source src context dialogue dialog",
    "article document problem request ask customer diff docstring documentation incorrect",
    "ungrammatical original abstract kontext contexte contexto artikel anchor claim premise search",
    "ingredients ingredient doc nl patient",
)
"""What is given to a model that answers, or to a search."""
ANSWERING = ANSWERS | _words(
    "doctor answer response reply output completion assistant",
    "ai bot gpt target tgt trg gt highlight",
    "solution code sql agent correct corrected standard paraphrase translation zusammenfassung",
    "resumen func tldr passage positive pos function evidence hypothesis hypo jd candidate",
    "direction snippet ideal",
)
"""What is generated, or found by a query."""
SUBJECTS = _words("headline subject summary caption betreff objet asunto assunto oggetto")
"""The short text above another one, which it belongs to. A title may name a product or a place."""
HEADINGS = SUBJECTS | _words(
    "title titel titre título titolo заголовок название тема başlık 标题 タイトル 제목"
)
TITLES = _names(
    "assunto asunto başlık betreff headline judul konu objet oggetto onderwerp short_description",
    "subject summary temat titel title titolo titre tiêu_đề tytuł título заголовок тема العنوان",
    "الموضوع عنوان विषय शीर्षक タイトル 主旨 主题 件名 标题 標題 题目 제목",
)
"""Names of headings that are read with the text below them, if it has one of `BODIES`."""
BODIES = _names(
    "abstract article açıklama bericht beschreibung body contenido content contenu contenuto",
    "conteúdo cuerpo descripción description descrizione descrição deskripsi inhalt inhoud isi",
    "içerik konten mensagem mensaje message messaggio metin mô_tả nachricht nội_dung omschrijving",
    "opis tekst testo text texte texto treść опис описание содержание сообщение текст المحتوى",
    "review_content النص الوصف पाठ विवरण 內容 内容 問い合わせ内容 描述 文本 本文 正文 説明",
    "내용 본문 설명",
)
"""Names of texts that have a heading. A title above a review may name a product."""
METADATA = _words(
    "absender address adres adresse afzender age agence agent agente alter am annotator assignee",
    "at atendente auteur author autor autora autore autorin autrice bahasa bearbeiter benutzer",
    "branch bron browser by canal canale channel cidade città city ciudad client cliente company",
    "correo country creator currency customer data_hora date datetime datum device dil dirección",
    "domain edad email endereço enseigne expéditeur fecha filiale finished firma fonte fuente",
    "gebruiker gender geschlecht guest género gênero handler herkunft idioma indirizzo język",
    "kanaal kanal kaynak klant klantnaam klient konsultant kota kraj kullanıcı kunde kundenname",
    "land lang language langue lingua link locale location loja língua magasin mail mağaza",
    "medewerker miasto mittente month müşteri nadawca negara negozio ngày nickname nombre_cliente",
    "nutzer nutzername on operator organization origin ort owner pays país pelanggan pengguna",
    "penulis phone place platform progress province quelle recipient region remetente remitente",
    "reporter requester responsável reviewer seller sender sexe shop sklep source sprache stad",
    "stadt store sucursal sumber taal tanggal tarih telefon time timestamp timezone to town",
    "tác_giả uhrzeit url user username usuario usuário utente utilisateur użytkownik vendor",
    "version ville website winkel yazar year âge ülke şehir źródło автор адрес город дата джерело",
    "имя источник канал клиент клієнт користувач країна магазин мова місто оператор пользователь",
    "страна язык ім'я البلد التاريخ العميل العنوان_البريدي الكاتب اللغة المؤلف المدينة المستخدم",
    "المصدر تاريخ उपयोगकर्ता ग्राहक तारीख दिनांक देश नाम पता भाषा लेखक शहर स्रोत ユーザー",
    "ユーザー名 住所 作者 受付日 国 国家 地址 城市 处理人 客户 年代 年齢 店舗 店铺 性別 投稿日",
    "投稿者 担当 担当者 日付 日時 日期 时间 昵称 来源 氏名 渠道 用户 用户名 著者 言語 语言 负责人",
    "都市 顧客 顧客名 고객 고객명 국가 나이 날짜 담당자 도시 사용자 성별 언어 일시 작성일 작성자",
    "주소 지점 출처",
)
"""Last words of names, or whole ones, of what is known about a sample: people, places, times."""
THINGS = _words(
    "airline app artikel artist assureur book brand course doctor film game hotel imię isim item",
    "marca marka marke marque merk model movie naam nama name namn nom nombre nome prodotto",
    "product producto produit produk produkt produto restaurant song tên ürün бренд имя товар",
    "الاسم الفندق المنتج उत्पाद नाम 产品 名前 名称 品牌 商品 商品名 姓名 施設名 氏名 製品 酒店",
    "브랜드 상품 상품명 이름 제품",
)
"""The same for what a sample is about: that may be a part of it if it is described."""
DESCRIBING = _words(
    "açıklama beschreibung descripción description descrizione descrição deskripsi omschrijving",
    "opis опис описание الوصف विवरण 描述 説明 설명",
)
"""Names of texts that describe things."""
REPLIES = _names(
    "companypublicresponse companyreply companyreplycontent developerresponse owneranswer",
    "developerreplytext ownerresponse replycontent responsefromowner responsefromownertext",
    "sellerreply",
)
"""Names, without separators, of what is answered to a review, which is complete without it."""
STATES = _words(
    "durum estado stan state stato status statut état состояние статус الحالة स्थिति ステータス",
    "状态 状況 狀態 상태",
)
"""Last words of names that say how far the work on a sample is, if it has another label."""
OTHER_TEXTS = _words(
    "description email data utt statement describe improve open excerpt poem quote",
    "selftext full story command bio lyric lyrics plot joke synopsis",
)
OTHER_LABELS = _words(
    "classname",
    "accept stance flag diagnosis stage variety team y result quality relevance fraudulent segment",
    "ground truth satisfied verdict decision l1 term choice cyberbullying assignment nps activity",
    "subtask a richtig disposition occupation period action frame recommend recommended",
)
"""Names of labels, among other columns of few values."""
VERDICTS = _words("correctness feedback helpfulness is_correct liked quality_score thumbs_up")
"""Names of what is thought of a completion, which may be a bad one."""
RECORDS = _words(
    "active archived available closed deleted edited image inbound logo open pinned premium public",
    "published purchase purchased question read remote reply retweet seen telecommuting verified",
    "logged_in",
)
"""Last words of names of flags that say how a record is kept, not what its text says."""
WORKS = _words("album artist asin band brand cast director isbn lyric plot price song synopsis")
"""Last words of names in tables of works and products, whose titles are no part of a text."""
PARTS = _words("extracted highlighted matched quoted selected")
"""First words of names of parts of a text."""
AGGREGATES = _words("average avg confidence mean median std")
"""Words in names of numbers that were computed of others."""
DATES = _words("date datum data fecha дата tarih tanggal ngày 日付 日期 날짜 التاريخ दिनांक")
"""First words of names of dates: `date_avis`."""
ALL = frozenset(
    word
    for word in TEXTS | LABELS | QUESTIONS | ANSWERS | TITLES | BODIES | METADATA | THINGS | STATES
    if len(word) > 2 or not word.isascii()
)
"""Words that only the names of columns are likely to be, if several are in a row."""
