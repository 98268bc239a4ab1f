{{- define "oncehook.name" -}}
{{- $whole := contains .Chart.Name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) }}
{{- $whole | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "oncehook.selector" -}}
app.kubernetes.io/name: oncehook
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "oncehook.labels" -}}
{{ include "oncehook.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- /* A pod of receivers or workers: `component`, `args`, `port` (a name and a number), `preStop`, `resources`. */}}
{{- define "oncehook.pod" -}}
metadata:
  labels:
    {{- include "oncehook.labels" . | nindent 4 }}
  annotations:
    checksum/settings: {{ .root.Values.settings | sha256sum }}
    {{- with .root.Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: 60
  securityContext: { runAsNonRoot: true, runAsUser: 10001, runAsGroup: 10001, seccompProfile: { type: RuntimeDefault } }
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "oncehook.selector" . | nindent 10 }}
  {{- with .root.Values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .root.Values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .root.Values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .component }}
      image: "{{ .root.Values.image.repository }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}"
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      args: {{ toJson .args }}
      env:
        - name: ONCEHOOK_STORE
          valueFrom: { secretKeyRef: { name: {{ .root.Values.existingSecret }}, key: store } }
      ports:
        - { name: {{ .port }}, containerPort: {{ .number }} }
      startupProbe: { httpGet: { path: /readyz, port: {{ .port }} }, periodSeconds: 2, failureThreshold: 60 }
      livenessProbe: { httpGet: { path: /livez, port: {{ .port }} }, periodSeconds: 10, timeoutSeconds: 5 }
      readinessProbe: { httpGet: { path: /readyz, port: {{ .port }} }, periodSeconds: 5, timeoutSeconds: 5 }
      {{- if .preStop }}
      # Endpoints learn of a stop a little later than the pod does: let the last arrivals come before the signal.
      lifecycle: { preStop: { exec: { command: ["sleep", "5"] } } }
      {{- end }}
      resources:
        {{- toYaml .resources | nindent 8 }}
      securityContext: { allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: { drop: [ALL] } }
      volumeMounts:
        - { name: settings, mountPath: /etc/oncehook, readOnly: true }
        - { name: secrets, mountPath: /run/secrets/oncehook, readOnly: true }
        - { name: tmp, mountPath: /tmp }
  volumes:
    - name: settings
      configMap: { name: {{ include "oncehook.name" .root }} }
    - name: secrets
      secret: { secretName: {{ .root.Values.existingSecret }} }
    - name: tmp
      emptyDir: {}
{{- end }}
